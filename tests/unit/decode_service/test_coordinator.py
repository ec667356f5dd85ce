"""Requests from admission to their one end, with a scripted KV source and compute thread."""

from __future__ import annotations

import asyncio
import time

import pytest

from decode_service.coordinator import CoordinatorLimits, RequestCoordinator
from decode_service.handoff import HandoffRequest, LandedKv
from decode_service.open_request import OpenRequest, ValidRequest
from decode_service.runner import Removed, Sampled, StepFailed
from decode_service.scheduler import DecodeSequence, SequenceId
from decode_service.stop_rule import FinishReason, StopRule
from serving_core.errors import (
    ComputeError,
    DeadlineError,
    DrainingError,
    KvCorruptError,
    OverloadedError,
    RequestCancelledError,
)
from serving_core.request import SamplingParams
from serving_core.telemetry import DecodeMetrics
from tests.support.eventually import until

FIRST_TOKEN = 7
STOP_TOKEN = 2


class ScriptedKv:
    """Lands when told to; remembers what was not given back."""

    def __init__(self) -> None:
        self.may_land = asyncio.Event()
        self.error: Exception | None = None
        self.asked: list[HandoffRequest] = []
        self.held: list[LandedKv] = []

    async def receive(self, request: HandoffRequest) -> LandedKv:
        """KV of the request."""
        self.asked.append(request)
        await self.may_land.wait()
        if self.error is not None:
            raise self.error
        landed = LandedKv(
            ticket_id=bytes([len(self.asked)] * 16),
            block_ids=tuple(range(request.num_blocks)),
            first_token_id=FIRST_TOKEN,
            num_cached_tokens=0,
            pushed_bytes=64,
            queue_time_s=0.0,
            compute_time_s=0.0,
            exposed_transfer_s=0.0,
        )
        self.held.append(landed)
        return landed

    def release(self, landed: LandedKv) -> None:
        """Take the blocks back."""
        self.held.remove(landed)


class ScriptedCompute:
    """Remembers commands; the test answers them."""

    def __init__(self) -> None:
        self.joined: list[DecodeSequence] = []
        self.leaving: list[SequenceId] = []

    def join(self, sequence: DecodeSequence) -> None:
        """Take a sequence."""
        self.joined.append(sequence)

    def leave(self, sequence_id: SequenceId) -> None:
        """Be told to let it go."""
        self.leaving.append(sequence_id)


class Bench:
    """A coordinator between its fakes."""

    def __init__(self, *, max_open: int = 4, max_unread_tokens: int = 16) -> None:
        self.kv = ScriptedKv()
        self.compute = ScriptedCompute()
        self.num_idle = 0
        self.coordinator = RequestCoordinator(
            kv_source=self.kv,
            compute=self.compute,
            limits=CoordinatorLimits(
                max_open=max_open,
                max_num_seqs=2,
                block_size=4,
                max_unread_tokens=max_unread_tokens,
            ),
            metrics=DecodeMetrics("test"),
            on_idle=self._on_idle,
            clock=time.monotonic,
        )

    def _on_idle(self) -> None:
        self.num_idle += 1

    def submit(
        self, name: str = "r", *, timeout_s: float = 30.0, max_tokens: int = 8
    ) -> OpenRequest:
        """Submit a request of five prompt tokens."""
        request = ValidRequest(
            client_request_id=name,
            prompt_token_ids=(3, 4, 5, 6, 7),
            sampling=SamplingParams(),
            seed=1,
            stop_rule=StopRule(
                stop_token_ids=frozenset({STOP_TOKEN}), min_tokens=0, max_tokens=max_tokens
            ),
            deadline_s=time.monotonic() + timeout_s,
        )
        return self.coordinator.submit(request, is_streaming=True, text_stops=None)

    async def submit_decoding(self, name: str = "r") -> tuple[OpenRequest, DecodeSequence]:
        """Submit a request and let its KV land."""
        one = self.submit(name)
        self.kv.may_land.set()
        await until(lambda: bool(self.compute.joined))
        return one, self.compute.joined[-1]


@pytest.fixture
def bench() -> Bench:
    """A fresh bench."""
    return Bench()


async def test_request_streams_first_and_later_tokens_and_gives_blocks_back(bench: Bench) -> None:
    one, sequence = await bench.submit_decoding()
    assert bench.kv.asked[0].num_blocks == 4  # (5 + 8) rows in blocks of 4
    assert (sequence.num_tokens, sequence.last_token_id) == (6, FIRST_TOKEN)
    sid = sequence.sequence_id
    bench.coordinator.on_results([Sampled(sequence_id=sid, token_id=9, finish=None)])
    assert (await one.stream.next_delta()).token_ids == (FIRST_TOKEN, 9)
    assert bench.kv.held
    bench.coordinator.on_results(
        [Sampled(sequence_id=sid, token_id=STOP_TOKEN, finish=FinishReason.STOP)]
    )
    delta = await one.stream.next_delta()
    assert delta.finish is not None
    assert (delta.token_ids, delta.finish.matched_token_id) == ((STOP_TOKEN,), STOP_TOKEN)
    assert bench.kv.held == []
    await until(lambda: bench.coordinator.num_open == 0)
    assert bench.num_idle == 1


async def test_request_of_one_token_never_reaches_the_compute_thread(bench: Bench) -> None:
    one = bench.submit(max_tokens=1)
    bench.kv.may_land.set()
    delta = await one.stream.next_delta()
    assert delta.finish is not None
    assert (delta.token_ids, delta.finish.reason) == ((FIRST_TOKEN,), FinishReason.LENGTH)
    await until(lambda: bench.coordinator.num_open == 0)
    assert bench.compute.joined == []
    assert bench.kv.held == []


async def test_cancel_while_decoding_keeps_blocks_until_the_step_is_over(bench: Bench) -> None:
    one, sequence = await bench.submit_decoding()
    bench.coordinator.cancel(one)
    await until(lambda: bool(bench.compute.leaving))
    assert bench.kv.held  # a step may still write
    bench.coordinator.on_results(
        [Sampled(sequence_id=sequence.sequence_id, token_id=9, finish=None)]
    )
    assert bench.kv.held
    bench.coordinator.on_results([Removed(sequence_id=sequence.sequence_id)])
    assert bench.kv.held == []
    await until(lambda: bench.coordinator.num_open == 0)
    assert bench.compute.leaving == [sequence.sequence_id]
    with pytest.raises(RequestCancelledError):
        await one.stream.next_delta()


async def test_cancel_before_the_first_step_of_its_task_ends_it(bench: Bench) -> None:
    one = bench.submit()
    bench.coordinator.cancel(one)
    await until(lambda: bench.coordinator.num_open == 0)
    assert bench.kv.asked == []


async def test_cancel_while_waiting_for_kv_ends_the_hand_off(bench: Bench) -> None:
    one = bench.submit()
    await until(lambda: bool(bench.kv.asked))
    bench.coordinator.cancel(one)
    await until(lambda: bench.coordinator.num_open == 0)
    assert bench.kv.held == []


async def test_abort_ends_every_request_of_that_name_and_no_other(bench: Bench) -> None:
    twins = [bench.submit("same"), bench.submit("same")]
    other = bench.submit("")
    await until(lambda: len(bench.kv.asked) == 3)
    assert bench.coordinator.abort("same") == 2
    for one in twins:
        finish = (await one.stream.next_delta()).finish
        assert finish is not None
        assert finish.reason is FinishReason.ABORT
    await until(lambda: bench.coordinator.num_open == 1)
    assert bench.coordinator.abort("same") == 0
    assert other.stream.is_open
    bench.coordinator.cancel(other)
    await until(lambda: bench.coordinator.num_open == 0)


async def test_deadline_ends_the_request_with_its_own_error(bench: Bench) -> None:
    one = bench.submit(timeout_s=0.01)
    with pytest.raises(DeadlineError):
        await one.stream.next_delta()
    await until(lambda: bench.coordinator.num_open == 0)


async def test_hand_off_error_reaches_the_client(bench: Bench) -> None:
    one = bench.submit()
    bench.kv.error = KvCorruptError("planned")
    bench.kv.may_land.set()
    with pytest.raises(KvCorruptError, match="planned"):
        await one.stream.next_delta()


async def test_failed_step_ends_the_request_and_frees_its_blocks(bench: Bench) -> None:
    one, sequence = await bench.submit_decoding()
    bench.coordinator.on_results(
        [StepFailed(sequence_id=sequence.sequence_id, message="ValueError")]
    )
    assert bench.kv.held == []
    with pytest.raises(ComputeError, match="ValueError"):
        await one.stream.next_delta()
    await until(lambda: bench.coordinator.num_open == 0)


async def test_slow_reader_beyond_the_bound_is_cut_off_and_leaves_the_batch() -> None:
    bench = Bench(max_unread_tokens=3)
    one, sequence = await bench.submit_decoding()
    sid = sequence.sequence_id
    for token_id in (10, 11, 12):
        bench.coordinator.on_results([Sampled(sequence_id=sid, token_id=token_id, finish=None)])
    assert bench.compute.leaving == [sid]
    with pytest.raises(OverloadedError):
        await one.stream.next_delta()
    bench.coordinator.on_results([Removed(sequence_id=sid)])
    assert bench.kv.held == []


async def test_too_many_open_requests_are_refused_with_a_delay() -> None:
    bench = Bench(max_open=1)
    one = bench.submit()
    with pytest.raises(OverloadedError, match="limit is 1") as caught:
        bench.submit()
    assert caught.value.retry_after_s > 0
    bench.coordinator.cancel(one)
    await until(lambda: bench.coordinator.num_open == 0)
    bench.coordinator.cancel(bench.submit())
    await until(lambda: bench.coordinator.num_open == 0)


async def test_drain_refuses_new_requests_and_waits_for_open_ones(bench: Bench) -> None:
    _, sequence = await bench.submit_decoding()
    draining = asyncio.create_task(bench.coordinator.drain(5.0))
    await until(lambda: bench.coordinator.is_draining)
    with pytest.raises(DrainingError):
        bench.submit()
    bench.coordinator.on_results(
        [Sampled(sequence_id=sequence.sequence_id, token_id=9, finish=FinishReason.LENGTH)]
    )
    assert await draining


async def test_drain_beyond_its_grace_ends_the_rest(bench: Bench) -> None:
    one = bench.submit()
    assert not await bench.coordinator.drain(0.01)
    assert bench.coordinator.num_open == 0
    with pytest.raises(DrainingError):
        await one.stream.next_delta()


async def test_counts_tell_running_and_waiting(bench: Bench) -> None:
    _, sequence = await bench.submit_decoding()
    bench.kv.may_land.clear()
    waiting = bench.submit()
    coordinator = bench.coordinator
    assert (coordinator.num_open, coordinator.num_running) == (2, 1)
    assert coordinator.num_waiting_tokens == 5
    coordinator.cancel(waiting)
    await until(lambda: coordinator.num_open == 1)
    assert coordinator.num_waiting_tokens == 0
    coordinator.on_results([StepFailed(sequence_id=sequence.sequence_id, message="end")])
    assert coordinator.num_running == 0
