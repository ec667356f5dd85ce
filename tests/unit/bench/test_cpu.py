"""Who had the cores: shares, processes that come and go, and the real counters of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench.cpu import (
    CpuMeter,
    CpuReading,
    ProcessCpu,
    ProcessKey,
    choose_cores,
    parse_proc_stat,
    process_cpu_s,
    read_cpu,
    used_s,
    window,
)

SHELL = ProcessKey(10, 1.0)
COMPILER = ProcessKey(11, 2.0)


def reading(
    wall_s: float,
    *,
    busy_s: float = 0.0,
    steal_s: float = 0.0,
    ours_s: float = 0.0,
    others: dict[ProcessKey, ProcessCpu] | None = None,
) -> CpuReading:
    return CpuReading(
        wall_s=wall_s, busy_s=busy_s, steal_s=steal_s, ours_s=ours_s, others=others or {}
    )


def test_window_busy_time_that_is_not_ours_is_foreign() -> None:
    seen = window(
        reading(5.0, busy_s=100.0, ours_s=7.0, steal_s=1.0),
        reading(15.0, busy_s=112.0, ours_s=17.0, steal_s=2.0),
        2,
    )
    assert seen.wall_s == 10.0
    assert seen.foreign_share == pytest.approx(0.1)
    assert seen.own_share == pytest.approx(0.5)
    assert seen.steal_share == pytest.approx(0.05)


def test_window_bursts_that_the_kernel_overlooks_are_seen_in_the_process() -> None:
    seen = window(
        reading(0.0, others={SHELL: ProcessCpu(4.0, 0.0)}),
        reading(10.0, busy_s=9.0, ours_s=10.0, others={SHELL: ProcessCpu(6.0, 0.0)}),
        2,
    )
    assert seen.foreign_share == pytest.approx(0.1)


def test_window_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        window(reading(1.0), reading(1.0), 2)


def test_used_s_process_that_ended_counts_from_the_start_of_the_window() -> None:
    before = {SHELL: ProcessCpu(1.0, 0.0), COMPILER: ProcessCpu(5.0, 0.5)}
    after = {SHELL: ProcessCpu(1.0, 7.5)}
    assert used_s(before, after) == pytest.approx(2.0)


def test_used_s_process_that_began_and_still_runs_counts_wholly() -> None:
    before = {SHELL: ProcessCpu(1.0, 0.0)}
    after = {SHELL: ProcessCpu(1.0, 0.0), COMPILER: ProcessCpu(3.0, 0.0)}
    assert used_s(before, after) == pytest.approx(3.0)


def test_used_s_process_that_nobody_waited_for_hides_no_other() -> None:
    before = {SHELL: ProcessCpu(1.0, 0.0), COMPILER: ProcessCpu(50.0, 0.0)}
    after = {SHELL: ProcessCpu(2.0, 0.0)}
    assert used_s(before, after) == pytest.approx(1.0)


def test_used_s_id_used_again_is_another_process() -> None:
    before = {ProcessKey(11, 2.0): ProcessCpu(5.0, 0.0)}
    after = {ProcessKey(11, 9.0): ProcessCpu(0.5, 0.0)}
    assert used_s(before, after) == pytest.approx(0.5)


def test_parse_proc_stat_interrupts_are_busy_and_waiting_is_not() -> None:
    #                user nice system idle iowait irq softirq steal guest
    text = "cpu  100 10 50 9000 700 3 7 30 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
    assert parse_proc_stat(text, 100) == pytest.approx((1.7, 0.3))


def test_meter_stopped_before_its_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        CpuMeter().stop()


def test_meter_started_again_measures_from_then() -> None:
    readings = iter([reading(0.0), reading(10.0, busy_s=10.0), reading(20.0, busy_s=11.0)])
    meter = CpuMeter(lambda: next(readings), num_cores=1)
    meter.start()
    meter.start()
    assert meter.stop().foreign_share == pytest.approx(0.1)


def spin(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_read_cpu_counts_own_work_and_that_of_ended_children_as_ours() -> None:
    before = read_cpu()
    spin(0.1)
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.15: pass"], check=True
    )
    after = read_cpu()
    assert after.ours_s - before.ours_s >= 0.22
    assert not any(key.pid == os.getpid() for key in after.others)


def test_process_cpu_s_counts_what_this_process_used() -> None:
    before_s = process_cpu_s(os.getpid())
    spin(0.05)
    assert 0.05 <= process_cpu_s(os.getpid()) - before_s < 5.0


def test_choose_cores_more_than_there_are_gives_none() -> None:
    available = sorted(os.sched_getaffinity(0))
    assert choose_cores(len(available)) == tuple(available)
    assert choose_cores(len(available) + 1) == ()
