"""What the prefill service refuses: each refusal names field and limit, and costs nothing."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kv_transfer.spans import RowRange
from kv_transfer.ticket import Ticket
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.rpc import wire
from serving_core.rpc.status import reason_of
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tests.support.fake_decode import FakeDecode, Handoff
from tests.support.prefill_harness import Prefill, running_prefill

PROMPT = list(range(3, 43))
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    return load_model(recall_dir)


@pytest.fixture
async def prefill(model: CausalLM) -> AsyncIterator[Prefill]:
    async with running_prefill(model, max_model_len=256) as running:
        yield running


async def refusal_of(handoff: Handoff) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await handoff.rest()
    assert handoff.result.kinds == []
    return refused.value


def set_field(path: str, value: Any) -> Callable[[Any], None]:
    """Returns what sets the field `a.b.c` of a message."""

    def change(message: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = message[int(parent)] if parent.isdigit() else getattr(message, parent)
        setattr(message, name, value)

    return change


BAD_STARTS: dict[str, tuple[Callable[[pb.Start], None], str, str]] = {
    "empty_prompt": (lambda s: s.ClearField("prompt_token_ids"), "prompt_token_ids", "at least 1"),
    "token_out_of_range": (
        lambda s: s.prompt_token_ids.append(VOCAB_SIZE),
        "prompt_token_ids = 512",
        "below 512",
    ),
    "prompt_too_long": (
        lambda s: s.prompt_token_ids.extend([3] * 256),
        "prompt_token_ids = 296",
        "256",
    ),
    "push_from_the_end": (
        set_field("push_from_token", 40),
        "push_from_token = 40",
        "below 40",
    ),
    "all_tokens_are_output": (
        set_field("num_output_tokens", 40),
        "num_output_tokens = 40",
        "below 40",
    ),
    "no_handoff_id": (lambda s: s.ClearField("handoff_id"), "handoff_id", "1 to 256"),
    "no_timeout": (lambda s: s.ClearField("timeout"), "timeout = 0.0 s", "(0 s"),
    "negative_timeout": (
        lambda s: s.timeout.CopyFrom(duration_pb2.Duration(seconds=-1)),
        "timeout = -1.0 s",
        "(0 s",
    ),
    "negative_temperature": (set_field("sampling.temperature", -1.0), "temperature", "-1"),
    "zero_top_p": (set_field("sampling.top_p", 0.0), "top_p", "0"),
    "banned_out_of_range": (
        lambda s: s.sampling.banned_token_ids.append(VOCAB_SIZE),
        "banned_token_ids = 512",
        "511",
    ),
    "everything_banned": (
        lambda s: s.sampling.banned_token_ids.extend(range(VOCAB_SIZE)),
        "banned_token_ids = 512 ids",
        "below 512",
    ),
}


@pytest.mark.parametrize("name", BAD_STARTS)
async def test_start_with_a_bad_field_is_invalid_argument(prefill: Prefill, name: str) -> None:
    change, field, limit = BAD_STARTS[name]
    start = prefill.decode.start(PROMPT)
    change(start)
    error = await refusal_of(await prefill.decode.begin(start))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(error.details())
    assert limit in str(error.details())


async def test_prompt_of_exactly_the_limit_is_computed(prefill: Prefill) -> None:
    reply = await prefill.decode.handshake()
    assert reply.max_prompt_tokens == 256
    _, reservation = await prefill.decode.prefill(prefill.decode.start([3] * 256))
    assert reservation.is_complete


@pytest.mark.parametrize("timeout_s", [86_400, 86_401, 2**62])
async def test_timeout_of_days_is_accepted(prefill: Prefill, timeout_s: int) -> None:
    start = prefill.decode.start(PROMPT, timeout=duration_pb2.Duration(seconds=timeout_s))
    _, reservation = await prefill.decode.prefill(start)
    assert reservation.is_complete


async def test_prompt_longer_than_the_empty_pool_is_refused(model: CausalLM) -> None:
    async with running_prefill(model, num_kv_blocks=4) as prefill:
        error = await refusal_of(await prefill.decode.begin(prefill.decode.start([3] * 33)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "32" in str(error.details())


async def test_start_of_an_unknown_session_is_failed_precondition(prefill: Prefill) -> None:
    start = prefill.decode.start(PROMPT, session_id="from another life")
    error = await refusal_of(await prefill.decode.begin(start))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "SESSION_UNKNOWN"


async def test_stream_that_does_not_begin_with_start_is_refused(prefill: Prefill) -> None:
    handoff = prefill.decode.open()
    await handoff.send(renew=pb.Renew(ticket_id=b"x" * 16))
    assert "Start as first message" in str((await refusal_of(handoff)).details())
    handoff = prefill.decode.open()
    await handoff.done_writing()
    assert (await refusal_of(handoff)).code() is grpc.StatusCode.INVALID_ARGUMENT


BAD_TICKETS: dict[str, tuple[Callable[[Ticket, FakeDecode], Ticket], str]] = {
    "other_decode": (lambda t, _: replace(t, decode_incarnation="other"), "decode_incarnation"),
    "other_prefill": (lambda t, _: replace(t, prefill_incarnation="other"), "prefill_incarnation"),
    "rows_start_late": (lambda t, _: replace(t, rows=RowRange(1, 40)), "ticket.rows"),
    "rows_end_early": (lambda t, _: replace(t, rows=RowRange(0, 39)), "ticket.rows"),
    "rows_end_late": (lambda t, _: replace(t, rows=RowRange(0, 41)), "ticket.rows"),
    "too_few_blocks": (lambda t, _: replace(t, block_ids=t.block_ids[:-1]), "ticket.block_ids"),
    "no_blocks": (lambda t, _: replace(t, block_ids=()), "ticket.block_ids"),
    "block_outside_the_region": (
        lambda t, _: replace(t, block_ids=(*t.block_ids[:-1], 128)),
        "ticket.block_ids",
    ),
    "block_twice": (
        lambda t, _: replace(t, block_ids=(*t.block_ids[:-1], t.block_ids[0])),
        "ticket.block_ids",
    ),
    "short_id": (lambda t, _: replace(t, id=b"x"), "ticket.id"),
    "short_mac": (lambda t, _: replace(t, mac=b"x"), "ticket.mac"),
    "no_lease": (lambda t, _: replace(t, lease_s=0.0), "ticket.lease"),
}


@pytest.mark.parametrize("name", BAD_TICKETS)
async def test_ticket_that_does_not_fit_is_rejected(prefill: Prefill, name: str) -> None:
    spoil, field = BAD_TICKETS[name]
    decode = prefill.decode
    handoff = await decode.begin(decode.start(PROMPT))
    await handoff.until("starting_soon")
    memory = bytes(decode.target.buffer)
    await handoff.grant(spoil(decode.reserve(len(PROMPT)).ticket, decode))
    result = await handoff.rest()
    assert result.kinds[-1] == "failed"
    assert result.failure.reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
    assert field in result.failure.message
    assert bytes(decode.target.buffer) == memory
    await decode.wait_whole(1.0)


async def test_ticket_that_was_used_before_is_rejected(prefill: Prefill) -> None:
    decode = prefill.decode
    _, reservation = await decode.prefill(decode.start(PROMPT))
    handoff = await decode.begin(decode.start(PROMPT))
    await handoff.until("starting_soon")
    await handoff.grant(reservation.ticket)
    result = await handoff.rest()
    assert result.failure.reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
    assert "used or revoked before" in result.failure.message


async def test_second_grant_is_rejected(prefill: Prefill) -> None:
    decode = prefill.decode
    handoff = await decode.begin(decode.start([3] * 256))
    await handoff.until("starting_soon")
    await handoff.grant(decode.reserve(256).ticket)
    await handoff.grant(decode.reserve(256).ticket)
    result = await handoff.rest()
    assert result.failure.reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
    assert "once, after StartingSoon" in result.failure.message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"start": pb.Start()}, "message is start"),
        ({}, "message is None"),
        ({"renew": pb.Renew(ticket_id=b"x" * 16)}, "renew.ticket_id"),
    ],
)
async def test_message_out_of_turn_fails_the_job(
    prefill: Prefill, message: dict[str, Any], text: str
) -> None:
    handoff = await prefill.decode.begin(prefill.decode.start(PROMPT))
    await handoff.until("starting_soon")
    await handoff.send(**message)
    result = await handoff.rest()
    assert result.failure.reason == errors_pb2.FAILURE_REASON_INVALID_REQUEST
    assert text in result.failure.message


MISMATCHES: dict[str, tuple[Callable[[pb.HandshakeRequest], None], str]] = {
    "protocol": (set_field("protocol_version", 2), "protocol_version: ours is 1, the peer's is 2"),
    "fingerprint": (set_field("layout.model_fingerprint", "other"), "the peer's is other"),
    "block_size": (set_field("layout.block_size", 16), "block_size: ours is 8, the peer's is 16"),
    "row_bytes": (
        set_field("layout.layers.1.components.0.row_bytes", 4),
        "layers[1].latent.row_bytes: ours is 256, the peer's is 4",
    ),
    "layers": (lambda r: r.layout.layers.pop(), "num_layers: ours is 3, the peer's is 2"),
    "engine": (set_field("region.engine", "shm"), "region.engine: ours is loopback"),
}


@pytest.mark.parametrize("name", MISMATCHES)
async def test_handshake_mismatch_names_field_and_both_values(prefill: Prefill, name: str) -> None:
    change, text = MISMATCHES[name]
    request = prefill.decode.handshake_request()
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefill.decode.stub.Handshake(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(refused.value) == "LAYOUT_MISMATCH"
    assert text in str(refused.value.details())


BAD_HANDSHAKES: dict[str, tuple[Callable[[pb.HandshakeRequest], None], str]] = {
    "no_incarnation": (set_field("decode_incarnation", ""), "decode_incarnation"),
    "no_layers": (lambda r: r.layout.ClearField("layers"), "layout.layers"),
    "component_missing": (lambda r: r.region.components.pop(), "region.components"),
    "component_twice": (
        lambda r: r.region.components.append(r.region.components[0]),
        "region.layers[0].latent",
    ),
    "component_outside": (
        set_field("region.components.0.base_bytes", 2**40),
        "region.layers[0].latent",
    ),
    "stride_too_small": (
        set_field("region.components.0.block_stride_bytes", 1),
        "block_stride_bytes",
    ),
    "no_blocks": (set_field("region.num_blocks", 0), "region.num_blocks"),
    "wrong_key": (set_field("region.access_key", secrets.token_bytes(32)), "region"),
}


@pytest.mark.parametrize("name", BAD_HANDSHAKES)
async def test_handshake_with_an_implausible_field_is_invalid_argument(
    prefill: Prefill, name: str
) -> None:
    change, field = BAD_HANDSHAKES[name]
    request = prefill.decode.handshake_request()
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefill.decode.stub.Handshake(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(refused.value.details())
    # The session from before is not touched by a refused handshake.
    _, reservation = await prefill.decode.prefill(prefill.decode.start(PROMPT))
    assert reservation.is_complete


async def test_handshake_to_unreachable_memory_is_unavailable(prefill: Prefill) -> None:
    request = prefill.decode.handshake_request()
    request.region.address = "loopback-99"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefill.decode.stub.Handshake(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_revoke_of_a_malformed_ticket_id_is_invalid_argument(prefill: Prefill) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await prefill.decode.revoke(b"")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ticket.id = 0 bytes: must be 16 bytes" in str(refused.value.details())


async def test_full_queue_is_resource_exhausted_and_drains_by_itself(model: CausalLM) -> None:
    async with running_prefill(model, max_num_seqs=1, max_queued_requests=1) as prefill:
        decode = prefill.decode
        running = await decode.begin(decode.start(PROMPT))
        await running.until("starting_soon")
        waiting = await decode.begin(decode.start(PROMPT))
        assert (await waiting.until("admitted")).num_pending_tokens == 0
        error = await refusal_of(await decode.begin(decode.start(PROMPT)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details if detail.Is(retry.DESCRIPTOR))
        assert retry.retry_delay.ToMilliseconds() > 0
        await running.send(revoke=pb.Revoke())
        assert (await running.rest()).drained
        await waiting.until("starting_soon")
        await waiting.send(revoke=pb.Revoke())
        assert (await waiting.rest()).drained


async def test_grant_before_starting_soon_is_rejected(model: CausalLM) -> None:
    async with running_prefill(model, max_num_seqs=1) as prefill:
        decode = prefill.decode
        running = await decode.begin(decode.start(PROMPT))
        await running.until("starting_soon")
        waiting = await decode.begin(decode.start(PROMPT))
        await waiting.until("admitted")
        await waiting.grant(decode.reserve(len(PROMPT)).ticket)
        result = await waiting.rest()
        assert result.failure.reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
        await running.grant(decode.reserve(len(PROMPT)).ticket)
        assert len((await running.rest()).token_ids) == 1


async def test_too_many_decode_services_are_resource_exhausted(model: CausalLM) -> None:
    async with running_prefill(model, max_decode_sessions=1) as prefill:
        request = prefill.decode.handshake_request()
        request.decode_incarnation = "another decode"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await prefill.decode.stub.Handshake(request, timeout=5)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        old_session = prefill.decode.session_id
        await prefill.decode.handshake()  # the same decode service takes its own place
        error = await refusal_of(
            await prefill.decode.begin(prefill.decode.start(PROMPT, session_id=old_session))
        )
        assert reason_of(error) == "SESSION_UNKNOWN"
        result, _ = await prefill.decode.prefill(prefill.decode.start(PROMPT))
        assert len(result.token_ids) == 1


async def test_timeout_of_a_request_in_the_queue_is_reported(model: CausalLM) -> None:
    async with running_prefill(model, max_num_seqs=1) as prefill:
        decode = prefill.decode
        running = await decode.begin(decode.start(PROMPT))
        await running.until("starting_soon")
        waiting = await decode.begin(decode.start(PROMPT, timeout=wire.duration(0.05)))
        result = await waiting.rest()
        assert result.kinds == ["admitted", "failed"]
        assert result.failure.reason == errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED
        running.cancel()


async def test_missing_grant_is_reported(model: CausalLM) -> None:
    async with running_prefill(model, grant_timeout_s=0.1) as prefill:
        handoff = await prefill.decode.begin(prefill.decode.start(PROMPT))
        result = await handoff.rest()
        assert result.kinds == ["admitted", "starting_soon", "failed"]
        assert "no grant within 0.1 s" in result.failure.message
