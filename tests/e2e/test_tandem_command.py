"""The `tandem` command with real services and the default model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tandem.default_model import recall_questions
from tests.support.processes import wait_until

TANDEM = [sys.executable, "-m", "tandem.cli.main"]
READY_LIMIT_S = 15.0
EXIT_LIMIT_S = 15.0


@contextlib.contextmanager
def tandem_up(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running `tandem up --json` and its ready line; stopped in the end."""
    process = subprocess.Popen(
        [*TANDEM, "up", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(EXIT_LIMIT_S)
            assert process.stderr is not None
            raise AssertionError(f"tandem up ended early:\n{process.stderr.read()}")
        yield process, json.loads(line)
    finally:
        process.terminate()
        process.communicate(timeout=EXIT_LIMIT_S)


def child_pids(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def generate(address: str, *arguments: str) -> dict[str, Any]:
    """`tandem generate --json`, which must succeed."""
    result = subprocess.run(
        [*TANDEM, "generate", "--address", address, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.slow
def test_up_is_ready_in_time_answers_and_stops_without_orphans() -> None:
    """Two prefill and two decode services; equal prompts get equal answers from both."""
    started_at = monotonic()
    with tandem_up("--prefill", "2", "--decode", "2") as (process, ready):
        assert monotonic() - started_at < READY_LIMIT_S
        assert (len(ready["prefill"]), len(ready["decode"])) == (2, 2)
        pids = child_pids(process.pid)
        assert len(pids) == 5  # the router is the fifth
        (question,) = recall_questions(num_words=256, num_facts=8, num_questions=1, seed=1)
        answers = [
            generate(address, "--prompt", question.prompt, "--max-tokens", "3")
            for address in ready["decode"]
        ]
        assert answers[0]["text"].split() == question.answer.split()
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert answers[0]["finish_reason"] == "length"
        assert answers[0]["usage"]["prompt_tokens"] == 256
        assert answers[0]["timings"]["num_pushed_bytes"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(EXIT_LIMIT_S) == 0
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
            timeout_s=5,
            what="services gone",
        )


@pytest.mark.slow
def test_up_one_service_dies_stops_the_other_and_fails() -> None:
    with tandem_up() as (process, _):
        pids = child_pids(process.pid)
        os.kill(pids[0], signal.SIGKILL)
        assert process.wait(EXIT_LIMIT_S) == 1
        assert process.stderr is not None
        assert "prefill-0 ended by signal 9" in process.stderr.read()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_passes() -> None:
    """What `make demo` runs after its set-up."""
    result = subprocess.run(
        [sys.executable, "-m", "tandem.demo"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 of 12 answers equal the single process in every token" in result.stdout
    assert "12 of 12 asked through the router are the same" in result.stdout
