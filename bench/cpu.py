"""Cores for the processes of a benchmark, and how much CPU others took meanwhile.

A figure of a machine that was busy with something else is not a figure. So each measurement has a
window, and what other processes ran in it is known: the time that the kernel counts as busy, less
the time of our own processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

MAX_FOREIGN_CPU_SHARE = 0.05

# Fields of the "cpu" line of /proc/stat.
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """Counters at one moment, in seconds.

    Attributes:
        wall_s: Monotonic clock.
        busy_s: Time in which a core of this machine ran anything, over all cores.
        steal_s: Time in which the host of a virtual machine gave a core to others.
        ours_s: CPU time of this process and its descendants, ended ones included.
    """

    wall_s: float
    busy_s: float
    steal_s: float
    ours_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWindow:
    """Who had the cores between two readings.

    Attributes:
        wall_s: Length of the window.
        foreign_share: CPU of processes that are not ours, as a share of all cores.
        steal_share: What the host of a virtual machine took, as a share of all cores.
        own_share: CPU of our processes, as a share of all cores.
    """

    wall_s: float
    foreign_share: float
    steal_share: float
    own_share: float


def window(before: CpuReading, after: CpuReading, num_cores: int) -> CpuWindow:
    """Return the shares between two readings.

    Raises:
        ValueError: No time has passed.
    """
    wall_s = after.wall_s - before.wall_s
    if wall_s <= 0:
        raise ValueError("the window is empty")
    capacity_s = wall_s * num_cores
    ours_s = after.ours_s - before.ours_s
    foreign_s = after.busy_s - before.busy_s - ours_s
    return CpuWindow(
        wall_s=wall_s,
        # The counters tick, so in a short window ours may seem to be more than all.
        foreign_share=max(0.0, foreign_s) / capacity_s,
        steal_share=(after.steal_s - before.steal_s) / capacity_s,
        own_share=ours_s / capacity_s,
    )


def parse_proc_stat(text: str, ticks_per_s: int) -> tuple[float, float]:
    """Return (busy, stolen) seconds since boot, summed over the cores, from /proc/stat.

    Interrupts count as busy: the kernel charges them to the process that they interrupt.
    """
    ticks = [int(field) for field in text.splitlines()[0].split()[1:]]
    busy = sum(ticks[field] for field in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ))
    return busy / ticks_per_s, ticks[_STEAL] / ticks_per_s


def tree_cpu_s(root: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants.

    What a child used moves to its parent's count of children when it is waited for, so the sum does
    not fall when one ends.
    """
    total_s = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def read_cpu() -> CpuReading:
    """Read the counters of this machine."""
    ours_s = tree_cpu_s(psutil.Process())
    text = Path("/proc/stat").read_text(encoding="ascii")
    busy_s, steal_s = parse_proc_stat(text, os.sysconf("SC_CLK_TCK"))
    return CpuReading(wall_s=time.monotonic(), busy_s=busy_s, steal_s=steal_s, ours_s=ours_s)


class CpuMeter:
    """Measures one window: `start`, `stop`."""

    def __init__(
        self, read: Callable[[], CpuReading] = read_cpu, num_cores: int | None = None
    ) -> None:
        """Use `read`; the number of cores is this machine's unless given."""
        self._read = read
        self._num_cores = num_cores if num_cores is not None else (os.cpu_count() or 1)
        self._before: CpuReading | None = None

    def start(self) -> None:
        """Begin the window, again if it had begun."""
        self._before = self._read()

    def stop(self) -> CpuWindow:
        """End the window.

        Raises:
            RuntimeError: It was not begun.
        """
        if self._before is None:
            raise RuntimeError("the window was not started")
        return window(self._before, self._read(), self._num_cores)


def choose_cores(num_processes: int) -> tuple[int, ...]:
    """Return a core for each process; empty when this process may not use that many."""
    available = sorted(os.sched_getaffinity(0))
    return tuple(available[:num_processes]) if len(available) >= num_processes else ()


def pin(core: int) -> None:
    """Keep the calling thread, and all threads and processes it will start, on one core."""
    os.sched_setaffinity(0, {core})


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process's own threads have used, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
