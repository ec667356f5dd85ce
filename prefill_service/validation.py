"""Checks on what decode services send, before anything is reserved for it.

Every refusal names the field, its value and the limit; nothing here has an effect.
"""

from dataclasses import dataclass

from kv_transfer.errors import LayoutError
from kv_transfer.layout import KvLayout, StagingMap, compare, placements
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Ticket
from prefill_service.job import JobRequest
from prefill_service.sessions import DecodeSession, Peer
from serving_core.errors import InvalidRequestError, LayoutMismatchError, PromptTooLongError
from serving_core.rpc import wire
from serving_core.sampler import SampleRequest
from tandem.v1 import prefill_service_pb2 as pb

MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt must keep to.

    Attributes:
        vocab_size: Token ids lie below it.
        max_prompt_tokens: Longest prompt that fits the empty pool and the model.
    """

    vocab_size: int
    max_prompt_tokens: int


def parse_start(start: pb.Start, *, limits: PromptLimits) -> JobRequest:
    """Check a Start message and return what it asks for.

    Raises:
        InvalidRequestError: A field is wrong.
        PromptTooLongError: The prompt does not fit.
    """
    _check_id("handoff_id", start.handoff_id)
    num_tokens = len(start.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("prompt_token_ids", "0 tokens", "at least 1 token")
    if num_tokens > limits.max_prompt_tokens:
        raise PromptTooLongError("prompt_token_ids", num_tokens, limits.max_prompt_tokens)
    largest = max(start.prompt_token_ids)
    if largest >= limits.vocab_size:
        raise InvalidRequestError("prompt_token_ids", largest, f"below {limits.vocab_size}")
    if start.push_from_token >= num_tokens:
        raise InvalidRequestError("push_from_token", start.push_from_token, f"below {num_tokens}")
    if start.num_output_tokens >= num_tokens:
        raise InvalidRequestError(
            "num_output_tokens", start.num_output_tokens, f"below {num_tokens}"
        )
    return JobRequest(
        handoff_id=start.handoff_id,
        prompt_token_ids=tuple(start.prompt_token_ids),
        push_from=start.push_from_token,
        num_output_tokens=start.num_output_tokens,
        sampling=_parse_sampling(start, num_tokens=num_tokens, vocab_size=limits.vocab_size),
        timeout_s=_timeout_s(start),
    )


def _timeout_s(start: pb.Start) -> float:
    """Seconds of the timeout; a client may have all the time it likes, but no job gets a year."""
    if start.timeout.seconds >= wire.MAX_DURATION_S:
        return wire.MAX_DURATION_S
    return wire.seconds("timeout", start.timeout)


def _parse_sampling(start: pb.Start, *, num_tokens: int, vocab_size: int) -> SampleRequest:
    sampling = wire.sampling_from_proto(start.sampling, vocab_size=vocab_size)
    num_banned = len(set(sampling.banned_token_ids))
    if num_banned >= vocab_size:
        raise InvalidRequestError(
            "sampling.banned_token_ids", f"{num_banned} ids", f"below {vocab_size} ids"
        )
    return SampleRequest(
        params=sampling.params,
        seed=sampling.seed,
        position=num_tokens,
        banned_token_ids=sampling.banned_token_ids,
    )


def parse_handshake(
    request: pb.HandshakeRequest,
    *,
    protocol_version: int,
    layout: KvLayout,
    engine_name: str,
    can_fence_writer: bool,
) -> Peer:
    """Check that KV can move to the caller and return who it is.

    Raises:
        LayoutMismatchError: The two services cannot exchange KV; names the first difference.
        InvalidRequestError: A field is wrong.
    """
    if request.protocol_version != protocol_version:
        raise LayoutMismatchError("protocol_version", protocol_version, request.protocol_version)
    _check_id("decode_incarnation", request.decode_incarnation)
    theirs = wire.layout_from_proto(request.layout)
    if mismatches := compare(layout, theirs):
        first = mismatches[0]
        raise LayoutMismatchError(first.field, first.ours, first.theirs)
    region, descriptor = wire.region_from_proto(request.region)
    if descriptor.engine != engine_name:
        raise LayoutMismatchError("region.engine", engine_name, descriptor.engine)
    if not (can_fence_writer or isinstance(region, StagingMap)):
        raise InvalidRequestError(
            "region.slot_bytes", 0, f"a staging ring: {engine_name} needs one"
        )
    try:
        if isinstance(region, StagingMap):
            region.rows_per_slot(theirs)
        else:
            placements(region, theirs)
    except LayoutError as error:
        raise InvalidRequestError(error.field, error.value, error.limit) from error
    return Peer(decode_incarnation=request.decode_incarnation, descriptor=descriptor, region=region)


def check_ticket(
    ticket: Ticket, *, session: DecodeSession, prefill_incarnation: str, request: JobRequest
) -> None:
    """Check that a ticket belongs to the session and grants exactly what is to be pushed.

    Raises:
        InvalidRequestError: Names the first field that does not fit.
    """
    if ticket.decode_incarnation != session.decode_incarnation:
        raise InvalidRequestError(
            "ticket.decode_incarnation", ticket.decode_incarnation, "the session's incarnation"
        )
    if ticket.prefill_incarnation != prefill_incarnation:
        raise InvalidRequestError(
            "ticket.prefill_incarnation", ticket.prefill_incarnation, "this process's incarnation"
        )
    wanted = RowRange(request.push_from, request.num_tokens)
    if ticket.rows != wanted:
        raise InvalidRequestError("ticket.rows", ticket.rows, wanted)
    num_rows_held = len(ticket.block_ids) * session.target_block_size
    if num_rows_held < request.num_tokens:
        raise InvalidRequestError(
            "ticket.block_ids",
            f"room for {num_rows_held} rows",
            f"room for at least {request.num_tokens} rows",
        )
    largest = max(ticket.block_ids)
    if largest >= session.num_target_blocks:
        raise InvalidRequestError("ticket.block_ids", largest, f"below {session.num_target_blocks}")


def _check_id(field: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_LENGTH:
        raise InvalidRequestError(
            field, f"{len(value)} characters", f"1 to {MAX_ID_LENGTH} characters"
        )
