"""Runs what README.md tells people to type in its section "Use it", as it stands there.

Only the ports are replaced, and the `tandem` command is the one of this checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.router import free_port

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_TIMEOUT_S = 60.0
DECODE_PORT, ROUTER_PORT = "50051", "8000"
FACT = ["river", "stone", "cloud"]


def blocks(language: str) -> list[str]:
    """The fenced blocks of the section, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [section] = re.findall(r"^## Use it\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return [content for found, content in FENCE.findall(section) if found == language]


SHELL, PYTHON = blocks("sh"), blocks("python")
[START] = [block for block in SHELL if "tandem up" in block]
COMMANDS = [block for block in SHELL if block is not START]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the README's `tandem up` started, and how to run its other blocks against it."""

    ports: dict[str, str]
    environment: dict[str, str]

    def run(self, command: list[str], text: str) -> str:
        """Output of a block that must succeed; its ports are replaced."""
        for written, port in self.ports.items():
            text = text.replace(f":{written}", f":{port}")
        result = subprocess.run(
            [*command, text],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def shell(self, block: str) -> str:
        """Run commands as bash does."""
        return self.run(["bash", "-euo", "pipefail", "-c"], block)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """`tandem up` with the README's flags on free ports."""
    bin_dir = tmp_path_factory.mktemp("bin")
    tandem = bin_dir / "tandem"
    tandem.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tandem.cli.main "$@"\n')
    tandem.chmod(0o755)
    ports = {DECODE_PORT: str(free_port()), ROUTER_PORT: str(free_port())}
    [line] = [line for line in START.splitlines() if line.startswith("tandem up")]
    words = [ports.get(word, word) for word in shlex.split(line)]
    assert set(ports.values()) < set(words), "the README starts it on ports of its own"
    environment = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(
        [*words, "--json"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "ready"
        yield Started(ports=ports, environment=environment)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def streamed_text(output: str) -> str:
    """Text of the events of a streamed chat."""
    lines = [line.removeprefix("data: ") for line in output.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices: list[dict[str, Any]] = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_section_has_the_blocks_that_are_run_here() -> None:
    """One that starts everything; curl; the official client; gRPC by command and by code."""
    assert START.splitlines()[0] == ". .venv/bin/activate"
    assert ["curl" in block for block in COMMANDS] == [True, False]
    assert ["openai" in block for block in PYTHON] == [True, False]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    elsewhere = [content for _, content in FENCE.findall(text) if content not in SHELL + PYTHON]
    assert not [block for block in elsewhere if re.search(r"curl|tandem (up|generate)", block)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_curl_commands_give_the_fact_by_completions_and_chat(started: Started) -> None:
    first, second = re.split(r"\n\n(?=curl )", COMMANDS[0].strip())
    completion = json.loads(started.shell(first))
    assert completion["choices"][0]["text"].split() == FACT
    assert streamed_text(started.shell(second)).split() == FACT


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tandem_generate_gives_the_fact(started: Started) -> None:
    assert started.shell(COMMANDS[1]).split()[: len(FACT)] == FACT


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_official_client_gives_the_fact(started: Started) -> None:
    assert started.run([sys.executable, "-c"], PYTHON[0]).split() == FACT


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_grpc_client_gives_the_fact_and_a_seeded_answer(started: Started) -> None:
    greedy, seeded = started.run([sys.executable, "-c"], PYTHON[1]).splitlines()
    assert greedy.split() == FACT
    assert re.fullmatch(r"\(\d+, \d+, \d+\) length [\d.]+", seeded)
