"""Decode with two scripted prefill services: what is tried again on the other one, and what is not.

A request that no other one runs beside goes to the first peer, so that is the one that misbehaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from decode_service.app import build
from kv_transfer.engine.loopback import LoopbackEngine
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.rpc.status import reason_of
from tests.e2e.test_decode_alone import Bench, make_config, make_request
from tests.support.eventually import until
from tests.support.scripted_prefill import Act, ScriptedPrefill


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    """The default model, loaded once."""
    return load_model(recall_dir)


@dataclass(kw_only=True)
class Peers(Bench):
    """A decode service with a second prefill service."""

    other: ScriptedPrefill

    def metric(self, name: str) -> float:
        """A counter or gauge, summed over its labels."""
        registry = self.app._parts.metrics.registry
        lines = generate_latest(registry).decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    @property
    def num_starts(self) -> tuple[int, int]:
        """Requests that each peer was given."""
        return len(self.prefill.starts), len(self.other.starts)


@pytest.fixture
async def peers(model: CausalLM, recall_dir: Path) -> AsyncIterator[Peers]:
    """A ready bench; in the end the service must stop with a whole pool."""
    engine = LoopbackEngine()
    both = [ScriptedPrefill(engine), ScriptedPrefill(engine)]
    for prefill in both:
        await prefill.start()
    config = replace(
        make_config(recall_dir, ""), prefill_address=tuple(prefill.address for prefill in both)
    )
    app = build(config, engine_factory=lambda _: engine, model=model)
    await app.start()
    async with grpc.aio.insecure_channel(app.address) as channel:
        one = Peers(
            app=app,
            prefill=both[0],
            other=both[1],
            engine=engine,
            stub=vllm_engine_pb2_grpc.VllmEngineStub(channel),
            channel=channel,
        )
        await until(lambda: one.metric("tandem_prefill_peer_usable{") == 2, pause_s=0.005)
        yield one
        for prefill in both:
            await prefill.stop()
        await app.stop()
        assert one.pool_is_whole


@pytest.mark.parametrize(
    "act",
    [
        Act.BREAK_AFTER_HALF,
        Act.FAIL_AFTER_HALF,
        Act.END_AFTER_HALF,
        Act.SEND_WRONG_DIGEST,
        Act.SEND_A_RECEIPT_TWICE,
        Act.FAIL_TO_COMPUTE,
        Act.REFUSE_AS_OVERLOADED,
        Act.FORGET_SESSION,
    ],
)
async def test_attempt_that_fails_is_made_again_by_the_other_peer(peers: Peers, act: Act) -> None:
    expected = (await peers.run(make_request())).token_ids
    peers.prefill.acts.append(act)
    assert (await peers.run(make_request())).token_ids == expected
    assert peers.num_starts == (2, 1)
    granted = [ticket.id for one in (peers.prefill, peers.other) for ticket in one.tickets]
    assert len(set(granted)) == len(granted)
    assert peers.metric("tandem_handoff_retries_total") == 1
    await peers.settle()


async def test_silent_peer_is_replaced_and_its_blocks_wait_for_its_word(peers: Peers) -> None:
    expected = (await peers.run(make_request())).token_ids
    peers.prefill.answers_revokes = False
    peers.prefill.acts.append(Act.STALL_AFTER_HALF)
    assert (await peers.run(make_request())).token_ids == expected
    assert peers.num_starts == (2, 1)
    stale, fresh = peers.prefill.tickets[-1], peers.other.tickets[-1]
    assert not set(stale.block_ids) & set(fresh.block_ids)
    await until(lambda: peers.app.pool.num_quarantined == len(stale.block_ids), pause_s=0.005)
    peers.prefill.answers_revokes = True
    await peers.settle()


async def test_request_that_no_peer_can_compute_is_tried_twice_and_blames_nobody(
    peers: Peers,
) -> None:
    for _ in range(5):
        peers.prefill.acts.append(Act.FAIL_TO_COMPUTE)
        peers.other.acts.append(Act.FAIL_TO_COMPUTE)
        error = await peers.fail(make_request())
        assert error.code() is grpc.StatusCode.INTERNAL
    assert peers.num_starts == (5, 5)
    assert peers.metric("tandem_prefill_breaker_state") == 0
    await peers.run(make_request())
    await peers.settle()


async def test_peer_whose_compute_fails_while_the_other_can_is_left_out(peers: Peers) -> None:
    peers.prefill.acts.extend([Act.FAIL_TO_COMPUTE] * 20)
    for _ in range(6):
        await peers.run(make_request())
    assert peers.num_starts == (3, 6)
    await peers.settle()


async def test_peer_that_always_fails_is_left_out_and_traffic_goes_on(peers: Peers) -> None:
    peers.prefill.acts.extend([Act.BREAK_AFTER_HALF] * 20)
    for _ in range(8):
        assert len((await peers.run(make_request())).token_ids) == 4
    assert peers.num_starts == (3, 8)
    assert peers.metric("tandem_prefill_breaker_state") == 2
    assert await peers.kv_is_ready()
    await peers.settle()


async def test_all_peers_failing_is_unavailable_with_a_delay_and_without_a_wait(
    peers: Peers,
) -> None:
    for one in (peers.prefill, peers.other):
        one.acts.extend([Act.BREAK_AFTER_HALF] * 20)
    for _ in range(3):
        await peers.fail(make_request())
    async with asyncio.timeout(0.4):  # less than the wait for a peer
        error = await peers.fail(make_request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "PREFILL_UNAVAILABLE"
    assert "breaker open" in error.details()
    assert peers.num_starts == (3, 3)
    await peers.settle()


async def test_overload_of_both_is_passed_on_and_opens_no_breaker(peers: Peers) -> None:
    for _ in range(5):
        peers.prefill.acts.append(Act.REFUSE_AS_OVERLOADED)
        peers.other.acts.append(Act.REFUSE_AS_OVERLOADED)
        error = await peers.fail(make_request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peers.num_starts == (5, 5)
    assert peers.metric("tandem_prefill_breaker_state") == 0


async def test_overload_leaves_half_of_the_retries_for_faults(peers: Peers) -> None:
    peers.prefill.acts.extend([Act.REFUSE_AS_OVERLOADED] * 7)
    codes = []
    for _ in range(7):
        try:
            await peers.run(make_request())
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    peers.prefill.acts.append(Act.BREAK_AFTER_HALF)
    await peers.run(make_request())
    await peers.settle()


async def test_empty_budget_leaves_the_fault_to_the_client(peers: Peers) -> None:
    """Every second request fails, which opens no breaker but is more than a tenth."""
    peers.prefill.acts.extend([Act.BREAK_AFTER_HALF, Act.COMPLETE] * 15)
    refused = []
    for _ in range(30):
        try:
            await peers.run(make_request())
        except grpc.aio.AioRpcError as error:
            refused.append(error)
    assert {error.code() for error in refused} == {grpc.StatusCode.UNAVAILABLE}
    assert all("planned break" in (error.details() or "") for error in refused)
    num_refused = len(refused)
    num_retries = peers.metric("tandem_handoff_retries_total")
    assert num_retries <= 10 + 30 / 10
    assert num_retries + num_refused == 15
    assert peers.metric("tandem_handoff_retries_denied_total") == num_refused > 0
    await peers.settle()


@pytest.mark.parametrize("leaves", [False, True])
async def test_request_whose_client_is_done_waiting_is_not_tried_again(
    peers: Peers, leaves: bool
) -> None:
    peers.prefill.acts.extend([Act.STALL_AFTER_HALF] * 5)
    for _ in range(5):
        call = peers.stub.Generate(make_request(), timeout=20 if leaves else 0.2)
        if leaves:
            num_before = len(peers.prefill.tickets)
            await until(lambda n=num_before: len(peers.prefill.tickets) > n, pause_s=0.005)
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
    await peers.settle()
    assert peers.num_starts == (5, 0)
    assert peers.metric("tandem_prefill_breaker_state") == 0
