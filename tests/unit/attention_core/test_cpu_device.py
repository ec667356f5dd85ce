"""Events complete when recorded and wake their waiters; graphs run what was frozen."""

from __future__ import annotations

import threading

import pytest
import torch

from attention_core.backends.cpu import CpuDevice


def test_event_that_nobody_records_never_completes() -> None:
    event = CpuDevice().new_event()
    assert not event.query()
    assert not event.synchronize(0.0)
    assert not event.synchronize(-1.0)
    assert not event.synchronize(0.01)


def test_event_once_recorded_is_complete_for_good() -> None:
    event = CpuDevice().new_event()
    event.record()
    event.record()
    assert event.query()
    assert event.synchronize(0.0)


def test_event_recorded_by_another_thread_wakes_every_waiter() -> None:
    event = CpuDevice().new_event()
    results: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: results.append(event.synchronize(30.0))) for _ in range(4)
    ]
    for waiter in waiters:
        waiter.start()
    event.record()
    for waiter in waiters:
        waiter.join(30.0)
    assert results == [True] * 4


def test_events_of_a_device_are_independent() -> None:
    device = CpuDevice()
    first, second = device.new_event(), device.new_event()
    first.record()
    assert first.query()
    assert not second.query()


def test_capture_runs_once_and_replay_sees_new_inputs() -> None:
    source, target = torch.zeros(3), torch.zeros(3)

    def step() -> None:
        target.copy_(source + 1)

    graph = CpuDevice().capture(step)
    assert target.tolist() == [1, 1, 1]
    source.fill_(4)
    assert target.tolist() == [1, 1, 1]
    graph.replay()
    assert target.tolist() == [5, 5, 5]


def test_capture_of_a_failing_step_fails_at_once() -> None:
    def step() -> None:
        raise ValueError("cannot run")

    with pytest.raises(ValueError, match="cannot run"):
        CpuDevice().capture(step)


def test_device_name_is_torchs() -> None:
    assert torch.device(CpuDevice().name).type == "cpu"
