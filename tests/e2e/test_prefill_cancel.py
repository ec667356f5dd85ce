"""Decode gives up in each phase, in each way: all blocks return, and no write comes after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.receiver import Reservation
from kv_transfer.session import JobState
from prefill_service.job import PrefillJob
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tests.support.eventually import until
from tests.support.fake_decode import Handoff
from tests.support.prefill_harness import (
    Gate,
    HookedEngine,
    HookedModel,
    Prefill,
    running_prefill,
)

PROMPT = list(range(3, 103))
WHOLE_AGAIN_S = 1.0


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    return load_model(recall_dir)


@dataclass(kw_only=True)
class Held:
    """A hand-off that stands in one phase until `release`."""

    prefill: Prefill
    handoff: Handoff
    job: PrefillJob
    reservations: list[Reservation]
    release: Callable[[], None]

    async def release_when_ending(self) -> None:
        """Releases the phase only after prefill has noticed that decode gives up."""
        await until(lambda: self.job.is_ending)
        self.release()


Phase = Callable[[CausalLM], AbstractAsyncContextManager[Held]]


def newest_job(prefill: Prefill) -> PrefillJob:
    return list(prefill.app._jobs._jobs.values())[-1]


@asynccontextmanager
async def queued(model: CausalLM) -> AsyncIterator[Held]:
    gate = Gate()
    hooked = HookedModel.of(model, lambda _: gate.hold())
    async with running_prefill(hooked, max_num_seqs=1) as prefill:
        decode = prefill.decode
        first = asyncio.create_task(decode.prefill(decode.start(PROMPT)))
        await until(lambda: gate.is_reached)
        handoff = await decode.begin(decode.start(PROMPT))
        await handoff.until("admitted")
        yield Held(
            prefill=prefill,
            handoff=handoff,
            job=newest_job(prefill),
            reservations=[],
            release=gate.open,
        )
        result, reservation = await first
        assert reservation.is_complete, "the one who runs is not disturbed"
        assert result.kinds[-1] in ("first", "progress")


@asynccontextmanager
async def waiting_for_grant(model: CausalLM) -> AsyncIterator[Held]:
    async with running_prefill(model) as prefill:
        handoff = await prefill.decode.begin(prefill.decode.start(PROMPT))
        await handoff.until("starting_soon")
        yield Held(
            prefill=prefill,
            handoff=handoff,
            job=newest_job(prefill),
            reservations=[],
            release=lambda: None,
        )


@asynccontextmanager
async def computing(model: CausalLM) -> AsyncIterator[Held]:
    gate = Gate()
    hooked = HookedModel.of(model, lambda layer: gate.hold() if layer == 1 else None)
    async with running_prefill(hooked) as prefill:
        handoff, reservation = await prefill.decode.granted(prefill.decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        yield Held(
            prefill=prefill,
            handoff=handoff,
            job=newest_job(prefill),
            reservations=[reservation],
            release=gate.open,
        )


@asynccontextmanager
async def pushing(model: CausalLM) -> AsyncIterator[Held]:
    gate = Gate()
    engine = HookedEngine(LoopbackEngine(), lambda number: gate.hold() if number == 4 else None)
    async with running_prefill(model, engine=engine) as prefill:
        handoff, reservation = await prefill.decode.granted(prefill.decode.start(PROMPT))
        await handoff.until("first")
        await until(lambda: gate.is_reached)
        yield Held(
            prefill=prefill,
            handoff=handoff,
            job=newest_job(prefill),
            reservations=[reservation],
            release=gate.open,
        )


PHASES = [queued, waiting_for_grant, computing, pushing]


def ticket_id_of(held: Held) -> bytes:
    return held.reservations[0].ticket.id if held.reservations else b""


async def by_message(held: Held) -> None:
    await held.handoff.send(revoke=pb.Revoke(ticket_id=ticket_id_of(held), cause="test"))
    await held.release_when_ending()
    drained = await held.handoff.until("drained")
    assert drained.ticket_id == ticket_id_of(held)
    assert await held.handoff.next() is None


async def by_half_close(held: Held) -> None:
    await held.handoff.done_writing()
    await held.release_when_ending()
    assert (await held.handoff.rest()).drained


async def by_broken_stream(held: Held) -> None:
    held.handoff.cancel()
    await held.release_when_ending()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", [by_message, by_half_close, by_broken_stream])
async def test_cancel_in_any_phase_returns_all_blocks(
    model: CausalLM,
    phase: Phase,
    way: Callable[[Held], Awaitable[None]],
) -> None:
    async with phase(model) as held:
        await way(held)
        if phase is not queued:
            await held.prefill.decode.wait_whole(WHOLE_AGAIN_S)
        await until(lambda: held.job.machine.is_terminal)
        assert held.job.machine.state is JobState.CANCELLED


@pytest.mark.parametrize("phase", [computing, pushing])
async def test_unary_revoke_answers_and_ends_the_stream(model: CausalLM, phase: Phase) -> None:
    async with phase(model) as held:
        revoking = asyncio.create_task(held.prefill.decode.revoke(ticket_id_of(held)))
        await held.release_when_ending()
        reply = await revoking
        assert reply.prefill_incarnation == held.prefill.decode.prefill_incarnation
        memory = bytes(held.prefill.decode.target.buffer)
        assert (await held.handoff.rest()).drained
        await held.prefill.decode.wait_whole(WHOLE_AGAIN_S)
        assert bytes(held.prefill.decode.target.buffer) == memory, "a write after the answer"


async def test_revoke_while_a_step_runs_drains_at_once_and_keeps_the_source_blocks(
    model: CausalLM,
) -> None:
    async with computing(model) as held:
        await held.handoff.send(revoke=pb.Revoke(ticket_id=ticket_id_of(held)))
        await held.handoff.until("drained")
        status = await held.prefill.decode.pool_status()
        assert status.num_active_jobs == 1
        assert status.num_free_blocks < status.num_blocks, "the running step still uses them"
        held.release()
        await held.prefill.decode.wait_whole(WHOLE_AGAIN_S)


async def test_revoke_while_a_write_runs_drains_only_after_the_write(model: CausalLM) -> None:
    async with pushing(model) as held:
        decode = held.prefill.decode
        revoking = asyncio.create_task(decode.revoke(ticket_id_of(held)))
        await until(lambda: held.job.is_ending)
        await decode.pool_status()
        assert not revoking.done()
        assert not held.handoff.result.drained
        held.release()
        await revoking
        assert (await held.handoff.rest()).drained


async def test_revoke_while_a_write_hangs_is_unavailable_and_frees_nothing(
    model: CausalLM,
) -> None:
    gate = Gate()
    engine = HookedEngine(LoopbackEngine(), lambda number: gate.hold() if number == 4 else None)
    async with running_prefill(model, engine=engine, drain_timeout_s=0.2) as prefill:
        decode = prefill.decode
        handoff, reservation = await decode.granted(decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await decode.revoke(reservation.ticket.id)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await handoff.rest()
        assert unary.value.code() is stream.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "has not ended" in str(stream.value.details())
        assert not handoff.result.drained
        status = await decode.pool_status()
        assert status.num_free_blocks < status.num_blocks
        gate.open()
        await decode.revoke(reservation.ticket.id)
        await decode.wait_whole(WHOLE_AGAIN_S)


async def test_grant_after_unary_revoke_of_its_ticket_is_refused(model: CausalLM) -> None:
    async with running_prefill(model) as prefill:
        decode = prefill.decode
        handoff = await decode.begin(decode.start(PROMPT))
        await handoff.until("starting_soon")
        reservation = decode.reserve(len(PROMPT))
        await decode.revoke(reservation.ticket.id)
        await decode.revoke(reservation.ticket.id)  # idempotent
        memory = bytes(decode.target.buffer)
        await handoff.grant(reservation.ticket)
        result = await handoff.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
        assert "used or revoked before" in result.failure.message
        assert bytes(decode.target.buffer) == memory
        await decode.wait_whole(WHOLE_AGAIN_S)


async def test_revoke_of_a_finished_ticket_is_drained(model: CausalLM) -> None:
    async with running_prefill(model) as prefill:
        result, reservation = await prefill.decode.prefill(prefill.decode.start(PROMPT))
        assert reservation.is_complete
        assert result.failure.reason == errors_pb2.FAILURE_REASON_UNSPECIFIED
        await prefill.decode.revoke(reservation.ticket.id)


async def test_cancel_of_one_leaves_the_others_of_the_step_alone(model: CausalLM) -> None:
    gate = Gate()
    hooked = HookedModel.of(model, lambda _: gate.hold())
    async with running_prefill(hooked, max_num_batched_tokens=64) as prefill:
        decode = prefill.decode
        victim, _ = await decode.granted(decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        victim_job = newest_job(prefill)
        others = [asyncio.create_task(decode.prefill(decode.start(PROMPT))) for _ in range(3)]
        await until(lambda: prefill.num_computing == 4)
        victim.cancel()
        await until(lambda: victim_job.is_ending)
        gate.open()
        for result, reservation in await asyncio.gather(*others):
            assert reservation.is_complete
            assert len(result.token_ids) == 1
