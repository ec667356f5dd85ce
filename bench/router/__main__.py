"""Measures what the router adds to the first token, and our servicer's CPU per streamed token.

    python -m bench.router [--json] [--save] [--output FILE] [--requests N] [--runs N]

What is on the clock is said in bench/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cpu import CpuMeter, choose_cores, pin
from bench.report import Report, add_options, finish
from bench.router.asking import Asking, DirectAsking, RoutedAsking
from bench.router.free_compute import Pace
from bench.router.processes import Service, running_router, running_service
from serving_core.tokenizer import Tokenizer
from tandem.default_model import default_model_dir

_PROMPT = "<bos> alice river stone cloud ? alice"
_NUM_WARM_UPS = 20
_TTFT_TOKENS = 2
# A higher percentile of fewer samples is a matter of luck.
_MIN_SAMPLES_FOR_P99 = 5000
_STREAMS = (
    # name, tokens of a run, pace
    ("cpu_ms_per_token_1", 1000, Pace(tokens_per_step=1, step_s=1e-3)),
    ("cpu_ms_per_token_8", 4000, Pace(tokens_per_step=8, step_s=1e-3)),
)
# Tokens that wait together leave together, so on a slow machine messages get longer and cheaper.
_MAX_LONGER_MESSAGES = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """One long answer, straight from the service; CPU times are the service's.

    Attributes:
        num_tokens: Tokens that came.
        num_messages: In so many messages.
        servicer_s: CPU of all threads but the one that makes the tokens.
        loop_s: The event loop's part of that.
    """

    num_tokens: int
    num_messages: int
    servicer_s: float
    loop_s: float


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure the router and the servicer.")
    parser.add_argument("--requests", type=int, default=500, help="requests on each of two ways")
    parser.add_argument("--runs", type=int, default=7, help="streams of each message size")
    add_options(parser)
    options = parser.parse_args()
    cores = choose_cores(2)
    if cores:
        pin(cores[1])
    model_dir = default_model_dir()
    prompt = Tokenizer.from_dir(model_dir).encode(_PROMPT)
    with (
        running_service(cores[0] if cores else None) as service,
        running_router(service.address) as router,
    ):
        ways: dict[str, Asking] = {
            "direct": DirectAsking(service.address, prompt),
            "routed": RoutedAsking(router, model_dir.name, _PROMPT),
        }
        meter = CpuMeter()
        meter.start()
        first_s = first_tokens(ways, options.requests)
        streams = stream_runs(service, ways["direct"], options.runs)
        cpu = meter.stop()
        for way in ways.values():
            way.close()
    report = Report(
        bench="router",
        figures={"router_ttft_ms": added_ms(first_s), **cpu_figures(streams)},
        details={
            "prompt_tokens": len(prompt),
            "first_token_ms": {way: _distribution(samples) for way, samples in first_s.items()},
            "streams": {name: [asdict(run) for run in runs] for name, runs in streams.items()},
        },
        cpu=cpu,
        pinned_cores=dict(zip(("service", "client", "router"), (*cores, cores[1]), strict=True))
        if cores
        else {},
        problems=longer_messages(streams),
    )
    return finish(report, options)


def first_tokens(ways: dict[str, Asking], num_requests: int) -> dict[str, list[float]]:
    """Return seconds to the first token by way; the ways take turns, one request at a time."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(_NUM_WARM_UPS + num_requests):
        order = list(ways) if number % 2 else list(reversed(ways))
        for way in order:
            answer = ways[way].ask(_TTFT_TOKENS)
            if number >= _NUM_WARM_UPS:
                samples[way].append(answer.first_s)
    return samples


def stream_runs(service: Service, direct: Asking, num_runs: int) -> dict[str, list[StreamRun]]:
    """Return runs of each message size, in turns; the first of each is not counted."""
    runs: dict[str, list[StreamRun]] = {name: [] for name, _, _ in _STREAMS}
    for number in range(num_runs + 1):
        for name, num_tokens, pace in _STREAMS:
            service.set_pace(pace)
            before = service.cpu_times()
            answer = direct.ask(num_tokens)
            after = service.cpu_times()
            compute_s = after.compute_s - before.compute_s
            run = StreamRun(
                num_tokens=answer.num_tokens,
                num_messages=answer.num_messages,
                servicer_s=after.process_s - before.process_s - compute_s,
                loop_s=after.loop_s - before.loop_s,
            )
            if number:
                runs[name].append(run)
    return runs


def added_ms(first_s: dict[str, list[float]]) -> float:
    """Return what the router adds to the median time to the first token."""
    return (statistics.median(first_s["routed"]) - statistics.median(first_s["direct"])) * 1e3


def cpu_figures(streams: dict[str, list[StreamRun]]) -> dict[str, float]:
    """Return the median CPU per token of each message size."""
    return {
        name: statistics.median(run.servicer_s / run.num_tokens for run in runs) * 1e3
        for name, runs in streams.items()
    }


def longer_messages(streams: dict[str, list[StreamRun]]) -> list[str]:
    """Return a problem for each size whose messages held more tokens than they should."""
    problems: list[str] = []
    for name, _, pace in _STREAMS:
        mean = statistics.median(run.num_tokens / run.num_messages for run in streams[name])
        if mean > pace.tokens_per_step * _MAX_LONGER_MESSAGES:
            problems.append(
                f"{name}: messages held {mean:.2f} tokens instead of {pace.tokens_per_step}"
            )
    return problems


def _distribution(samples_s: Sequence[float]) -> dict[str, Any]:
    content: dict[str, Any] = {"p50": statistics.median(samples_s) * 1e3}
    if len(samples_s) >= _MIN_SAMPLES_FOR_P99:
        content["p99"] = statistics.quantiles(samples_s, n=100)[98] * 1e3
    content["samples"] = [round(one * 1e3, 4) for one in samples_s]
    return content


if __name__ == "__main__":
    sys.exit(main())
