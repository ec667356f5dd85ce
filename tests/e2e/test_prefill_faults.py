"""Faults under a running prefill: told by layer and rank, and over with the job that had them."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.errors import WriteFaultError
from serving_core.errors import ComputeError
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.rpc.status import reason_of
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tests.support.eventually import until
from tests.support.prefill_harness import (
    Gate,
    HookedEngine,
    HookedModel,
    Prefill,
    running_prefill,
)
from tests.support.processes import ServiceProcess, running

PROMPT = list(range(3, 103))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    return load_model(recall_dir)


def once(fault: Callable[[], None], *, at: int) -> Callable[[int], None]:
    """Calls `fault` at the first call with `at`, and does nothing at all others."""
    calls = itertools.count()

    def hook(number: int) -> None:
        if number == at and next(calls) == 0:
            fault()

    return hook


async def health_of(prefill: Prefill, service: str) -> int:
    async with grpc.aio.insecure_channel(prefill.app.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(request, timeout=5)).status)


async def wait_kv_health(prefill: Prefill, status: int) -> None:
    async with asyncio.timeout(5):
        while await health_of(prefill, "tandem.kv") != status:
            pass


async def test_failed_write_names_layer_and_rank_and_the_next_request_succeeds(
    model: CausalLM,
) -> None:
    def fail() -> None:
        raise WriteFaultError("planned")

    # Three components a layer: the fifth write is in layer 1.
    engine = HookedEngine(LoopbackEngine(), once(fail, at=4))
    async with running_prefill(model, engine=engine, max_num_batched_tokens=512) as prefill:
        decode = prefill.decode
        result, reservation = await decode.prefill(decode.start(PROMPT))
        assert result.kinds[-1] == "failed"
        assert result.failure.reason == errors_pb2.FAILURE_REASON_WRITE_FAILED
        assert (result.failure.layer, result.failure.rank) == (1, 0)
        assert "layer 1 rank 0: planned" in result.failure.message
        assert not reservation.is_complete
        await decode.wait_whole(1.0)
        _, reservation = await decode.prefill(decode.start(PROMPT))
        assert reservation.is_complete


async def test_failed_step_names_its_layer_and_fails_its_jobs_only(model: CausalLM) -> None:
    def fail() -> None:
        raise RuntimeError("planned: a secret of the prompt")

    async with running_prefill(HookedModel.of(model, once(fail, at=1))) as prefill:
        decode = prefill.decode
        result, _ = await decode.prefill(decode.start(PROMPT))
        assert result.failure.reason == errors_pb2.FAILURE_REASON_COMPUTE_FAILED
        assert (result.failure.layer, result.failure.rank) == (1, 0)
        assert result.failure.message == "model step failed at layer 1 on rank 0: RuntimeError"
        await decode.wait_whole(1.0)
        _, reservation = await decode.prefill(decode.start(PROMPT))
        assert reservation.is_complete


async def test_lease_that_is_not_renewed_ends_the_job(model: CausalLM) -> None:
    gate = Gate()
    async with running_prefill(HookedModel.of(model, lambda _: gate.hold())) as prefill:
        handoff, _ = await prefill.decode.granted(prefill.decode.start(PROMPT), lease_s=0.3)
        result = await handoff.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_LEASE_EXPIRED
        gate.open()


async def test_lease_that_is_renewed_outlives_its_time(model: CausalLM) -> None:
    gate = Gate()
    async with running_prefill(HookedModel.of(model, lambda _: gate.hold())) as prefill:
        decode = prefill.decode
        handoff, reservation = await decode.granted(decode.start(PROMPT), lease_s=0.6)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        renew = pb.Renew(ticket_id=reservation.ticket.id)
        while loop.time() - started_s < 1.2:
            await handoff.send(renew=renew)
            await asyncio.sleep(0.1)
        gate.open()
        result = await handoff.rest()
        for receipt in result.receipts:
            reservation.accept(receipt)
        assert reservation.is_complete


async def test_decode_that_dies_ends_its_jobs_and_its_session(model: CausalLM) -> None:
    gate = Gate()
    async with running_prefill(HookedModel.of(model, lambda _: gate.hold())) as prefill:
        decode = prefill.decode
        assert await health_of(prefill, "tandem.ready") == SERVING
        await wait_kv_health(prefill, SERVING)
        handoff, _ = await decode.granted(decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        decode.target.close()
        result = await handoff.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_WRITE_FAILED
        gate.open()
        await wait_kv_health(prefill, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (await decode.begin(decode.start(PROMPT))).rest()
        assert reason_of(refused.value) == "SESSION_UNKNOWN"


async def test_new_handshake_lets_jobs_of_the_old_session_finish(model: CausalLM) -> None:
    gate = Gate()
    async with running_prefill(HookedModel.of(model, lambda _: gate.hold())) as prefill:
        decode = prefill.decode
        handoff, reservation = await decode.granted(decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        await decode.handshake()
        gate.open()
        for receipt in (await handoff.rest()).receipts:
            reservation.accept(receipt)
        assert reservation.is_complete


async def test_stop_finishes_the_running_refuses_the_waiting_and_the_new(
    model: CausalLM,
) -> None:
    gate = Gate()
    hooked = HookedModel.of(model, lambda _: gate.hold())
    async with running_prefill(hooked, max_num_seqs=1) as prefill:
        decode = prefill.decode
        handoff, reservation = await decode.granted(decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        waiting = await decode.begin(decode.start(PROMPT))
        await waiting.until("admitted")
        stopping = asyncio.create_task(prefill.app.stop())
        result = await waiting.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_DRAINING
        assert await health_of(prefill, "tandem.ready") == NOT_SERVING
        assert await health_of(prefill, "") == SERVING
        for refused in ((await decode.begin(decode.start(PROMPT))).rest(), decode.handshake()):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error.value) == "DRAINING"
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 0.3  # longer than the watch takes to look at everything
        while loop.time() < until_s:
            assert await health_of(prefill, "tandem.kv") == NOT_SERVING
        gate.open()
        for receipt in (await handoff.rest()).receipts:
            reservation.accept(receipt)
        assert reservation.is_complete
        await stopping


async def test_stop_fails_what_outlives_the_grace_time(model: CausalLM) -> None:
    gate = Gate()
    hooked = HookedModel.of(model, lambda _: gate.hold())
    async with running_prefill(hooked, drain_grace_s=0.1) as prefill:
        handoff, _ = await prefill.decode.granted(prefill.decode.start(PROMPT))
        await until(lambda: gate.is_reached)
        stopping = asyncio.create_task(prefill.app.stop())
        result = await handoff.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_DRAINING
        gate.open()
        await stopping


async def test_end_of_the_compute_thread_ends_the_service(model: CausalLM) -> None:
    def end_thread() -> None:
        raise SystemExit

    hooked = HookedModel.of(model, once(end_thread, at=2))
    async with running_prefill(hooked, drain_timeout_s=0.2) as prefill:
        handoff, _ = await prefill.decode.granted(prefill.decode.start(PROMPT))
        with pytest.raises(ComputeError):
            await asyncio.wait_for(prefill.app.wait(), 5)
        stopping = asyncio.create_task(prefill.app.stop())
        result = await handoff.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_DRAINING
        await stopping


def test_process_sigterm_exits_0(recall_dir: Path, tmp_path: Path) -> None:
    process = ServiceProcess(
        module="prefill_service",
        args=[f"--model={recall_dir}", "--port=0", f"--kv-socket-dir={tmp_path}"],
        log_path=tmp_path / "prefill.log",
    )
    with running([process]):
        assert process.address.startswith("127.0.0.1:")
        process.signal(signal.SIGTERM)
        assert process.wait_exit(10) == 0


def test_process_with_bad_settings_exits_2_and_names_them(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "prefill_service", "--block-size=0", "--no-such-key=1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    for word in ("block-size", "no-such-key", "model"):
        assert word in ended.stderr
