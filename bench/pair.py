"""Measures a local pair with the default model: TTFT, TPOT, bytes pushed, exposed transfer.

    python -m bench.pair [--repeats N] [--output FILE.json]

Requests run one after another, so the figures are latencies without load. The first request of each
prompt length is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.client import Client
from tandem.default_model import default_model_dir, recall_questions
from tandem.generation import Completion
from tandem.launcher import Launcher, LaunchSettings

PROMPT_WORDS = (256, 1024, 4096)
MAX_TOKENS = 32
_NUM_FACTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the requests of one prompt length; times in milliseconds."""

    prompt_tokens: int
    num_requests: int
    ttft_ms: float
    tpot_ms: float
    prefill_compute_ms: float
    exposed_transfer_ms: float
    pushed_bytes: int


def measure(client: Client, num_words: int, repeats: int) -> Row:
    """Asks `repeats` times with different prompts of one length."""
    completions: list[Completion] = []
    for seed in range(repeats + 1):
        (question,) = recall_questions(
            num_words=num_words, num_facts=_NUM_FACTS, num_questions=1, seed=seed
        )
        completions.append(client.complete(question.prompt, max_tokens=MAX_TOKENS, ignore_eos=True))
    timings = [completion.timings for completion in completions[1:]]
    return Row(
        prompt_tokens=num_words,
        num_requests=repeats,
        ttft_ms=_median_ms([one.ttft_s for one in timings]),
        tpot_ms=_median_ms([one.tpot_s for one in timings]),
        prefill_compute_ms=_median_ms([one.prefill_compute_s for one in timings]),
        exposed_transfer_ms=_median_ms([one.exposed_transfer_s for one in timings]),
        pushed_bytes=timings[0].num_pushed_bytes or 0,
    )


def _median_ms(seconds: Sequence[float | None]) -> float:
    measured = [value for value in seconds if value is not None]
    return round(statistics.median(measured) * 1e3, 3)


def _machine() -> dict[str, str | int]:
    """What the figures hold for."""
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "tandem": version("tandem-serve"),
    }


def _print(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="One request at a time, medians", title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in asdict(row).values()))
    console.print(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Measure a local pair with the default model.")
    parser.add_argument("--repeats", type=int, default=5, help="counted requests per length")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    launcher = Launcher(LaunchSettings(model_dir=default_model_dir()))
    with launcher, Client(launcher.start().decode[0]) as client:
        rows = [measure(client, num_words, options.repeats) for num_words in PROMPT_WORDS]
    _print(rows, Console(width=120))
    if options.output is not None:
        report = {"machine": _machine(), "rows": [asdict(row) for row in rows]}
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
