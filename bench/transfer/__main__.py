"""Measures pushes of scattered blocks between two processes of this machine.

    python -m bench.transfer [--json] [--save] [--output FILE] [--runs N]

What each method does, and which figures come out, is said in bench/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.cpu import CpuMeter, choose_cores, pin
from bench.report import Report, add_options, finish
from bench.transfer.methods import Method, has_mooncake
from bench.transfer.plan import NUM_SLOTS, PLANS, SLOT_BYTES, PushPlan
from bench.transfer.sender import Samples, Sender, connected

_GIB = 1 << 30
_ROLES = ("sender", "receiver")
Medians = Mapping[tuple[str, Method], float]


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Measure pushes of scattered blocks between two processes."
    )
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs of each method")
    add_options(parser)
    options = parser.parse_args()
    cores = choose_cores(len(_ROLES))
    if cores:
        pin(cores[0])
    meter = CpuMeter()
    with connected(cores[1] if cores else None) as sender:
        meter.start()
        bandwidth = copy_bandwidth(sender, options.runs)
        samples = {plan: sender.measure(plan, options.runs) for plan in PLANS}
        cpu = meter.stop()
    report = Report(
        bench="transfer",
        figures=figures(medians(samples)),
        details={
            "runs": options.runs,
            "ring": {"slot_bytes": SLOT_BYTES, "num_slots": NUM_SLOTS},
            "copy_gib_per_s": bandwidth,
            "pushes": [_push_details(plan, samples[plan], bandwidth) for plan in PLANS],
        },
        cpu=cpu,
        pinned_cores=dict(zip(_ROLES, cores, strict=False)),
        problems=[] if has_mooncake() else ["the package mooncake is not installed"],
    )
    return finish(report, options)


def copy_bandwidth(sender: Sender, num_runs: int) -> float:
    """Return the GiB/s of one memmove over memory that no cache holds: what one copy must cost."""
    half = sender.source.memory.nbytes // 2
    target = ctypes.create_string_buffer(half)
    times: list[float] = []
    for _ in range(num_runs + 1):
        started_s = time.perf_counter()
        ctypes.memmove(target, sender.source.address, half)
        times.append(time.perf_counter() - started_s)
    return half / _GIB / statistics.median(times[1:])


def medians(samples: Mapping[PushPlan, Mapping[Method, Samples]]) -> Medians:
    """Return the median seconds of a push by (size, method)."""
    return {
        (plan.label, method): statistics.median(one.push_s)
        for plan, by_method in samples.items()
        for method, one in by_method.items()
    }


def figures(push_s: Medians) -> dict[str, float]:
    """Return what is compared with a bound; speeds are ratios of medians, shares are of a push."""
    found = {
        f"shm_vs_memcpy_{size}": push_s[size, Method.MEMCPY] / push_s[size, Method.SHM_NO_DIGEST]
        for size in ("1MiB", "8MiB")
    }
    found["checksum_share_shm"] = _share(push_s, Method.SHM, Method.SHM_NO_DIGEST)
    if ("1MiB", Method.MOONCAKE) in push_s:
        found["mooncake_vs_tcp_1MiB"] = push_s["1MiB", Method.TCP] / push_s["1MiB", Method.MOONCAKE]
        found["mooncake_vs_naive_16KiB"] = (
            push_s["16KiB", Method.MOONCAKE_NAIVE] / push_s["16KiB", Method.MOONCAKE]
        )
        found["checksum_share_mooncake"] = _share(
            push_s, Method.MOONCAKE, Method.MOONCAKE_NO_DIGEST
        )
    return found


def _share(push_s: Medians, with_digest: Method, without: Method) -> float:
    """How much of a push of 1 MiB blocks goes away when neither side takes a digest."""
    return 1 - push_s["1MiB", without] / push_s["1MiB", with_digest]


def _push_details(
    plan: PushPlan, samples: Mapping[Method, Samples], bandwidth: float
) -> dict[str, Any]:
    return {
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
        "one_copy_ms": plan.num_bytes / _GIB / bandwidth * 1e3,
        "methods": {method: _method_details(plan, one) for method, one in samples.items()},
    }


def _method_details(plan: PushPlan, samples: Samples) -> dict[str, Any]:
    median_s = statistics.median(samples.push_s)
    pushed_gib = samples.pushed_bytes / _GIB
    return {
        "median_ms": median_s * 1e3,
        "gib_per_s": plan.num_bytes / _GIB / median_s,
        "sender_cpu_s_per_gib": samples.sender_cpu_s / pushed_gib,
        "receiver_cpu_s_per_gib": samples.receiver_cpu_s / pushed_gib,
        "samples_ms": [round(one * 1e3, 6) for one in samples.push_s],
    }


if __name__ == "__main__":
    sys.exit(main())
