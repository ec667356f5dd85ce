"""Cores for the processes of a benchmark, and how much CPU others took meanwhile.

A figure of a machine that was busy with something else is not a figure. So each measurement has a
window, and what other processes ran in it is counted in two ways, of which the larger holds: what
each process that is not ours used, and the time that the kernel counts as busy less our own. The
first does not see other containers, the second samples and overlooks short bursts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

MAX_FOREIGN_CPU_SHARE = 0.05

# Fields of the "cpu" line of /proc/stat.
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)
_CPUCLOCK_SCHED = 2


class ProcessKey(NamedTuple):
    """A process; ids are used again."""

    pid: int
    started_s: float


class ProcessCpu(NamedTuple):
    """CPU seconds of a process, and of its children that have ended and were waited for."""

    own_s: float
    children_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """Counters at one moment, in seconds.

    Attributes:
        wall_s: Monotonic clock.
        busy_s: Time in which a core of this machine ran anything, over all cores.
        steal_s: Time in which the host of a virtual machine gave a core to others.
        ours_s: CPU time of this process and its descendants, ended ones included.
        others: CPU time of every other process.
    """

    wall_s: float
    busy_s: float
    steal_s: float
    ours_s: float
    others: Mapping[ProcessKey, ProcessCpu]


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
    unexplained_s = after.busy_s - before.busy_s - ours_s
    return CpuWindow(
        wall_s=wall_s,
        foreign_share=max(unexplained_s, used_s(before.others, after.others)) / capacity_s,
        steal_share=(after.steal_s - before.steal_s) / capacity_s,
        own_share=ours_s / capacity_s,
    )


def used_s(
    before: Mapping[ProcessKey, ProcessCpu], after: Mapping[ProcessKey, ProcessCpu]
) -> float:
    """Return the CPU seconds that processes used between two readings.

    A process that has ended is seen in what its parent's children used, if it was waited for.
    """
    own_s = children_s = 0.0
    for key, cpu in after.items():
        earlier = before.get(key, ProcessCpu(0.0, 0.0))
        own_s += cpu.own_s - earlier.own_s
        children_s += cpu.children_s - earlier.children_s
    # What the ended ones had used before the window is part of that.
    children_s -= sum(sum(before[key]) for key in before.keys() - after.keys())
    return own_s + max(0.0, children_s)


def parse_proc_stat(text: str, ticks_per_s: int) -> tuple[float, float]:
    """Return (busy, stolen) seconds since boot, summed over the cores, from /proc/stat.

    Interrupts count as busy: the kernel charges them to the process that they interrupt.
    """
    ticks = [int(field) for field in text.splitlines()[0].split()[1:]]
    busy = sum(ticks[field] for field in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ))
    return busy / ticks_per_s, ticks[_STEAL] / ticks_per_s


def read_cpu() -> CpuReading:
    """Read the counters of this machine."""
    root = psutil.Process()
    ours = {process.pid for process in [root, *root.children(recursive=True)]}
    ours_s = 0.0
    others: dict[ProcessKey, ProcessCpu] = {}
    for process in psutil.process_iter(["cpu_times", "create_time"]):
        times = process.info["cpu_times"]
        if times is None:  # it has just ended
            continue
        cpu = ProcessCpu(times.user + times.system, times.children_user + times.children_system)
        if process.pid in ours:
            ours_s += sum(cpu)
        else:
            others[ProcessKey(process.pid, process.info["create_time"])] = cpu
    text = Path("/proc/stat").read_text(encoding="ascii")
    busy_s, steal_s = parse_proc_stat(text, os.sysconf("SC_CLK_TCK"))
    return CpuReading(
        wall_s=time.monotonic(), busy_s=busy_s, steal_s=steal_s, ours_s=ours_s, others=others
    )


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
