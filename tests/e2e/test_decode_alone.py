"""The decode service against a scripted prefill service: real gRPC, real bytes, one process.

What prefill does wrong here a real one does only when it dies, hangs or is broken. After each case
decode must have told its client the truth and have its whole pool back.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.app import App, build
from kv_transfer.engine.loopback import LoopbackEngine
from serving_core.config import DecodeConfig
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.rpc.status import reason_of
from tests.support.eventually import until
from tests.support.scripted_prefill import FIRST_TOKEN, Act, ScriptedPrefill

PROMPT = (3, 10, 11, 12, 40, 41, 42, 43, 44, 9)
NUM_BLOCKS = 32
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    """The default model, loaded once."""
    return load_model(recall_dir)


@dataclass(kw_only=True)
class Outcome:
    """One finished call."""

    token_ids: list[int]
    chunks: list[pb.GenerateStreamChunk]
    complete: pb.GenerateComplete
    timings: dict[str, float]


@dataclass(kw_only=True)
class Bench:
    """A decode service, its prefill service and a client."""

    app: App
    prefill: ScriptedPrefill
    engine: LoopbackEngine
    stub: Any
    channel: Any

    @property
    def pool_is_whole(self) -> bool:
        """Whether every block is free."""
        return bool(self.app.pool.num_free == self.app.pool.num_total)

    async def settle(self) -> None:
        """Wait until nothing is held, for at most a second."""
        await until(lambda: self.pool_is_whole, timeout_s=1.0, pause_s=0.005)
        self.app.pool.check_integrity()

    async def kv_is_ready(self) -> bool:
        """The health signal."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="tandem.kv"))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_kv(self, is_ready: bool) -> None:
        """Wait for the health signal."""
        async with asyncio.timeout(10):
            while await self.kv_is_ready() is not is_ready:  # noqa: ASYNC110 - remote state
                await asyncio.sleep(0.01)

    async def run(self, request: pb.GenerateRequest, **call: Any) -> Outcome:
        """Run a call to its end."""
        replies = self.stub.Generate(request, timeout=20, **call)
        chunks, complete = [], pb.GenerateComplete()
        async for reply in replies:
            if reply.HasField("chunk"):
                chunks.append(reply.chunk)
            else:
                complete = reply.complete
        metadata = dict(await replies.trailing_metadata())
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        return Outcome(
            token_ids=token_ids or list(complete.output_ids),
            chunks=chunks,
            complete=complete,
            timings=json.loads(metadata["tandem-timings-json"]),
        )

    async def fail(self, request: pb.GenerateRequest, **call: Any) -> grpc.aio.AioRpcError:
        """Run a call that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.run(request, **call)
        return caught.value


def make_request(
    prompt: Sequence[int] = PROMPT, *, stream: bool = True, request_id: str = "r", **sampling: Any
) -> pb.GenerateRequest:
    """A greedy request of four tokens that nothing but its length ends, unless told otherwise."""
    values = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**values),
        stream=stream,
    )


def make_config(recall_dir: Path, prefill_address: str) -> DecodeConfig:
    """Small pools and short waits."""
    return DecodeConfig(
        model=str(recall_dir),
        served_model_name="recall",
        kv_engine="loopback",
        prefill_address=(prefill_address,),
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=4,
        prefill_wait_s=0.5,
        renew_interval_s=0.05,
        revoke_timeout_s=0.3,
        reap_interval_s=0.02,
        drain_grace_s=5.0,
        prefill_silence_s=1.0,
    )


@pytest.fixture
async def bench(model: CausalLM, recall_dir: Path) -> AsyncIterator[Bench]:
    """A ready bench; in the end the service must stop with a whole pool."""
    engine = LoopbackEngine()
    prefill = ScriptedPrefill(engine)
    await prefill.start()
    config = make_config(recall_dir, prefill.address)
    app = build(config, engine_factory=lambda _: engine, model=model)
    await app.start()
    async with grpc.aio.insecure_channel(app.address) as channel:
        one = Bench(
            app=app,
            prefill=prefill,
            engine=engine,
            stub=vllm_engine_pb2_grpc.VllmEngineStub(channel),
            channel=channel,
        )
        await one.wait_kv(True)
        yield one
        await prefill.stop()
        await app.stop()
        assert one.pool_is_whole


async def test_generate_streams_deltas_then_complete_with_timings(bench: Bench) -> None:
    outcome = await bench.run(make_request())
    assert len(outcome.token_ids) == 4
    assert outcome.token_ids[0] == FIRST_TOKEN
    assert sum(chunk.completion_tokens for chunk in outcome.chunks) == 4
    assert {chunk.prompt_tokens for chunk in outcome.chunks} == {len(PROMPT)}
    complete = outcome.complete
    assert (complete.finish_reason, list(complete.output_ids)) == ("length", [])
    assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), 4)
    assert complete.cached_tokens == 3
    rows = bench.app.num_pushed_row_bytes * len(PROMPT)
    assert outcome.timings["num_pushed_bytes"] == rows
    assert 0 < outcome.timings["ttft_s"] <= outcome.timings["e2e_s"]
    assert outcome.timings["exposed_transfer_s"] >= 0
    await bench.settle()


async def test_generate_without_stream_returns_the_same_tokens_at_once(bench: Bench) -> None:
    streamed = await bench.run(make_request())
    whole = await bench.run(make_request(stream=False))
    assert whole.chunks == []
    assert list(whole.complete.output_ids) == streamed.token_ids


async def test_generate_text_equals_its_token_ids(bench: Bench) -> None:
    tokenizer = bench.app.tokenizer
    text = "the key of bob is"
    by_text = make_request(max_tokens=3)
    by_text.text = text
    by_ids = make_request(tokenizer.encode(text), max_tokens=3)
    found, expected = await bench.run(by_text), await bench.run(by_ids)
    assert found.token_ids == expected.token_ids
    assert found.complete.prompt_tokens == len(tokenizer.encode(text))


async def test_generate_seeded_sampling_repeats_and_reaches_prefill(bench: Bench) -> None:
    request = make_request(temperature=1.5, seed=42, max_tokens=12)
    first, second = await bench.run(request), await bench.run(request)
    other = await bench.run(make_request(temperature=1.5, seed=43, max_tokens=12))
    assert first.token_ids == second.token_ids != other.token_ids
    assert [start.sampling.seed for start in bench.prefill.starts] == [42, 42, 43]


async def test_generate_many_at_once_equals_one_by_one(bench: Bench) -> None:
    prompts = [[3 + i, *range(10, 10 + 3 * i), 9] for i in range(9)]
    requests = [make_request(prompt, request_id="same", max_tokens=6) for prompt in prompts]
    alone = [(await bench.run(request)).token_ids for request in requests]
    together = await asyncio.gather(*(bench.run(request) for request in requests))
    assert [outcome.token_ids for outcome in together] == alone
    await bench.settle()


async def test_stop_token_is_banned_below_min_tokens_then_ends_the_output(bench: Bench) -> None:
    tokens = (await bench.run(make_request(max_tokens=6))).token_ids
    stop = tokens[1]
    stopped = await bench.run(make_request(max_tokens=6, stop_token_ids=[stop]))
    assert stopped.token_ids == tokens[:2]
    complete = stopped.complete
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", stop)
    longer = await bench.run(make_request(max_tokens=6, stop_token_ids=[stop], min_tokens=4))
    assert stop not in longer.token_ids[:4]
    assert list(bench.prefill.starts[-1].sampling.banned_token_ids) == [stop]


async def test_stop_string_ends_the_output_and_is_named(bench: Bench) -> None:
    tokens = (await bench.run(make_request(max_tokens=6))).token_ids
    text = bench.app.tokenizer.decode(tokens[1:2], skip_special_tokens=False).strip()
    stopped = await bench.run(make_request(max_tokens=6, stop=[text]))
    assert stopped.complete.finish_reason == "stop"
    assert stopped.complete.matched_stop_str == text
    assert stopped.token_ids == tokens[: len(stopped.token_ids)]
    await bench.settle()


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (make_request([]), "empty"),
        (make_request([5] * 201), "at most 200"),  # what prefill's empty pool holds
        (make_request([10_000]), "10000"),
        (make_request(max_tokens=0), "max_tokens"),
        (make_request(max_tokens=10_000), "max_tokens"),
        (make_request(temperature=-1.0), "temperature"),
        (make_request(n=3), "sampling_params.n"),
        (pb.GenerateRequest(stream=True), "input"),
    ],
)
async def test_bad_request_is_invalid_argument_and_never_reaches_prefill(
    bench: Bench, request_: pb.GenerateRequest, word: str
) -> None:
    error = await bench.fail(request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert word in error.details()
    assert bench.prefill.starts == []
    assert bench.pool_is_whole


async def test_model_named_in_metadata_must_be_the_served_one(bench: Bench) -> None:
    error = await bench.fail(make_request(), metadata=(("x-tandem-model", "other"),))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    await bench.run(make_request(), metadata=(("x-tandem-model", "recall"),))


async def test_overloaded_prefill_is_passed_on_with_its_delay(bench: Bench) -> None:
    bench.prefill.acts.append(Act.REFUSE_AS_OVERLOADED)
    error = await bench.fail(make_request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it only reads the metadata
    assert status is not None
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_forgotten_session_is_renewed_and_the_request_served(bench: Bench) -> None:
    bench.prefill.acts.append(Act.FORGET_SESSION)
    assert len((await bench.run(make_request())).token_ids) == 4
    assert bench.prefill.num_handshakes == 2


@pytest.mark.parametrize(
    "act", [Act.SEND_WRONG_DIGEST, Act.SEND_WRONG_MAC, Act.SEND_A_RECEIPT_TWICE]
)
async def test_refused_receipt_is_retried_once_on_a_fresh_ticket(bench: Bench, act: Act) -> None:
    expected = (await bench.run(make_request())).token_ids
    bench.prefill.acts.append(act)
    assert (await bench.run(make_request())).token_ids == expected
    assert len({ticket.id for ticket in bench.prefill.tickets}) == 3
    await bench.settle()


async def test_refused_receipt_twice_is_never_served(bench: Bench) -> None:
    bench.prefill.acts.extend([Act.SEND_WRONG_DIGEST, Act.SEND_WRONG_DIGEST])
    error = await bench.fail(make_request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "KV_CORRUPT"
    assert len(bench.prefill.starts) == 2
    await bench.settle()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (Act.BREAK_AFTER_HALF, "planned break"),
        (Act.FAIL_AFTER_HALF, "layer 1 rank 0"),
        (Act.END_AFTER_HALF, "before all rows"),
    ],
)
async def test_hand_off_that_ends_early_is_unavailable_in_time(
    bench: Bench, act: Act, words: str
) -> None:
    bench.prefill.acts.append(act)
    async with asyncio.timeout(2):
        error = await bench.fail(make_request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert words in error.details()
    assert len(bench.prefill.starts) == 1  # nobody computes in silence, nobody retries
    await bench.settle()


async def test_writer_that_does_not_answer_keeps_its_blocks_until_it_is_dead(
    bench: Bench,
) -> None:
    bench.prefill.answers_revokes = False
    bench.prefill.acts.append(Act.BREAK_AFTER_HALF)
    await bench.fail(make_request())
    pool = bench.app.pool
    await until(lambda: pool.num_quarantined > 0, pause_s=0.005)
    num_quarantined = pool.num_quarantined
    await asyncio.sleep(0.1)  # several questions; time alone frees nothing
    assert pool.num_quarantined == num_quarantined
    assert pool.num_free == NUM_BLOCKS - num_quarantined
    bench.engine.end_writer(bench.prefill.incarnation)
    await bench.settle()


async def test_writer_that_answers_late_gives_its_blocks_back(bench: Bench) -> None:
    bench.prefill.answers_revokes = False
    bench.prefill.acts.append(Act.STALL_AFTER_HALF)
    call = bench.stub.Generate(make_request(), timeout=20)
    await until(lambda: bool(bench.prefill.tickets), pause_s=0.005)
    call.cancel()
    await until(lambda: bench.app.pool.num_quarantined > 0, pause_s=0.005)
    bench.prefill.answers_revokes = True
    await bench.settle()


@pytest.mark.parametrize("act", [Act.STAY_QUEUED, Act.STALL_AFTER_HALF])
async def test_client_that_leaves_before_the_first_token_frees_everything(
    bench: Bench, act: Act
) -> None:
    bench.prefill.acts.append(act)
    call = bench.stub.Generate(make_request(), timeout=20)
    await until(lambda: bench.prefill.num_open_calls == 1, pause_s=0.005)
    if act is Act.STALL_AFTER_HALF:
        await until(lambda: bench.prefill.num_renewals > 1, pause_s=0.005)
    call.cancel()
    await until(lambda: bench.prefill.num_open_calls == 0, timeout_s=1.0, pause_s=0.005)
    await bench.settle()


async def test_client_that_leaves_while_decoding_frees_everything(bench: Bench) -> None:
    call = bench.stub.Generate(make_request(max_tokens=200), timeout=20)
    assert (await call.read()).HasField("chunk")
    assert not bench.pool_is_whole
    call.cancel()
    await bench.settle()


@pytest.mark.parametrize("act", [Act.STAY_QUEUED, Act.STALL_AFTER_HALF])
async def test_abort_ends_the_stream_of_that_id_only(bench: Bench, act: Act) -> None:
    bench.prefill.acts.extend([act, act, act])
    calls = [
        asyncio.create_task(bench.run(make_request(request_id=name)))
        for name in ("twin", "twin", "")
    ]
    await until(lambda: bench.prefill.num_open_calls == 3, pause_s=0.005)
    await bench.stub.Abort(pb.AbortRequest(request_ids=["twin", "unknown"]))
    for call in calls[:2]:
        assert (await call).complete.finish_reason == "abort"
    assert not calls[2].done()
    await bench.stub.Abort(pb.AbortRequest(request_ids=[""]))
    await bench.stub.Abort(pb.AbortRequest(request_ids=[""]))  # idempotent
    assert (await calls[2]).complete.finish_reason == "abort"
    await bench.settle()


async def test_client_without_a_deadline_gets_the_default_one(bench: Bench) -> None:
    call = bench.stub.Generate(make_request())
    replies = [reply async for reply in call]
    assert replies[-1].complete.finish_reason == "length"
    timeout_s = bench.prefill.starts[0].timeout.ToNanoseconds() / 1e9
    assert 595 < timeout_s < 605


async def test_deadline_of_the_client_ends_the_hand_off(bench: Bench) -> None:
    bench.prefill.acts.append(Act.STALL_AFTER_HALF)
    call = bench.stub.Generate(make_request(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await bench.settle()


async def test_requests_beyond_the_pool_wait_and_are_all_served(bench: Bench) -> None:
    # Each needs 12 of 32 blocks.
    requests = [make_request([4 + i, 9], max_tokens=90) for i in range(6)]
    outcomes = await asyncio.gather(*(bench.run(request) for request in requests))
    assert {len(outcome.token_ids) for outcome in outcomes} == {90}
    await bench.settle()


async def test_prefill_that_restarts_is_another_incarnation_and_used_at_once(
    bench: Bench,
) -> None:
    port = int(bench.prefill.address.rsplit(":", 1)[1])
    await bench.prefill.stop()
    await bench.wait_kv(False)
    error = await bench.fail(make_request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no usable prefill service within 0.5 s" in error.details()
    assert not (await bench.stub.HealthCheck(pb.HealthCheckRequest())).healthy
    bench.prefill = ScriptedPrefill(bench.engine)
    await bench.prefill.start(port)
    await bench.wait_kv(True)
    assert len((await bench.run(make_request())).token_ids) == 4
    assert (await bench.stub.HealthCheck(pb.HealthCheckRequest())).healthy
    await bench.prefill.stop()


async def test_idle_prefill_that_stops_answering_cannot_move_kv_until_it_answers(
    bench: Bench,
) -> None:
    bench.prefill.hangs = True
    await bench.wait_kv(False)
    bench.prefill.hangs = False
    await bench.wait_kv(True)
    assert len((await bench.run(make_request())).token_ids) == 4


async def test_prefill_with_another_layout_is_never_used(model: CausalLM, recall_dir: Path) -> None:
    engine = LoopbackEngine()
    prefill = ScriptedPrefill(engine)
    prefill.changes_fingerprint = True
    await prefill.start()
    config = replace(make_config(recall_dir, prefill.address), prefill_wait_s=0.1)
    app = build(config, engine_factory=lambda _: engine, model=model)
    await app.start()
    async with grpc.aio.insecure_channel(app.address) as channel:
        await until(lambda: prefill.num_handshakes > 1, pause_s=0.01)
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(make_request(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError, match="mismatched"):
            await call.read()
    assert prefill.starts == []
    await app.stop()
    await prefill.stop()


async def test_stop_lets_running_requests_finish_and_refuses_new_ones(bench: Bench) -> None:
    running = asyncio.create_task(bench.run(make_request(max_tokens=150)))
    await until(lambda: not bench.pool_is_whole, pause_s=0.001)
    stopping = asyncio.create_task(bench.app.stop())
    await bench.wait_kv(False)
    error = await bench.fail(make_request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len((await running).token_ids) == 150
    await stopping


async def test_descriptions_and_loads_are_true(bench: Bench, model: CausalLM) -> None:
    info = await bench.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.served_model_name == "recall"
    assert info.is_generation
    assert info.vocab_size == model.config.vocab_size
    assert info.max_context_length == NUM_BLOCKS * BLOCK_SIZE
    assert tuple(info.eos_token_ids) == model.config.eos_token_ids
    server = await bench.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs) == (BLOCK_SIZE, 4)
    call = bench.stub.Generate(make_request(max_tokens=200), timeout=20)
    await call.read()
    load = (await bench.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
    assert load.num_used_tokens == 27 * BLOCK_SIZE  # 10 prompt and 200 output tokens
    assert load.max_total_num_tokens == NUM_BLOCKS * BLOCK_SIZE
    call.cancel()
    await bench.settle()
    load = (await bench.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
    assert (load.num_total_reqs, load.num_used_tokens) == (0, 0)


async def test_tokenizer_comes_as_one_zip_in_pieces_with_its_digest(bench: Bench) -> None:
    pieces = [piece async for piece in bench.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    archive = b"".join(piece.data for piece in pieces)
    assert all(len(piece.data) <= 65536 for piece in pieces)
    assert [piece.sha256 for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].sha256 == hashlib.sha256(archive).hexdigest()
    assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


async def test_rpc_that_is_not_served_answers_unimplemented(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
