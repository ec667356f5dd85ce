"""The benchmarks run, and say whether their figures count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_bench(*arguments: str) -> dict[str, Any]:
    """The JSON object of a run; its exit status must say whether it is valid."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.stdout, done.stderr
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if content["valid"] else 1), done.stderr
    assert content["valid"] == (not content["problems"])
    return content


@pytest.mark.slow
def test_bench_transfer_gives_every_figure_and_raw_samples() -> None:
    content = run_bench("bench.transfer", "--runs", "2")
    assert {
        "shm_vs_memcpy_1MiB",
        "shm_vs_memcpy_8MiB",
        "checksum_share_shm",
        "mooncake_vs_tcp_1MiB",
        "mooncake_vs_naive_16KiB",
        "checksum_share_mooncake",
    } <= content.keys()
    pushes = content["details"]["pushes"]
    assert [push["block_bytes"] >> 10 for push in pushes] == [4, 16, 64, 256, 1024, 8192]
    for push in pushes:
        for name, method in push["methods"].items():
            assert len(method["samples_ms"]) == 2, name
            assert min(method["samples_ms"]) > 0
            assert method["sender_cpu_s_per_gib"] > 0
            assert method["receiver_cpu_s_per_gib"] > 0


@pytest.mark.slow
def test_bench_router_gives_every_figure_and_raw_samples() -> None:
    content = run_bench("bench.router", "--requests", "20", "--runs", "1")
    assert content["router_ttft_ms"] > 0
    first = content["details"]["first_token_ms"]
    assert len(first["direct"]["samples"]) == len(first["routed"]["samples"]) == 20
    assert "p99" not in first["direct"]
    # At the same rate of messages, eight times the tokens share the cost of each.
    assert 0 < content["cpu_ms_per_token_8"] < content["cpu_ms_per_token_1"]
