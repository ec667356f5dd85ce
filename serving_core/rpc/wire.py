"""Translates between protobuf messages and the dataclasses of kv_transfer and the services.

Everything that comes in is checked here; a wrong field is an InvalidRequestError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import duration_pb2

from kv_transfer.engine.base import TargetDescriptor
from kv_transfer.errors import FieldError
from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    KvLayout,
    LayerLayout,
    RegionMap,
    StagingMap,
)
from kv_transfer.spans import RowRange
from kv_transfer.ticket import MAC_BYTES, TICKET_ID_BYTES, Receipt, Ticket
from serving_core.errors import InvalidRequestError
from serving_core.request import SamplingParams
from tandem.v1 import handoff_pb2, layout_pb2

MAX_NAME_CHARS = 256
MAX_LAYERS = 4096
MAX_COMPONENTS = 16
MAX_ACCESS_KEY_BYTES = 64
MAX_ADDRESS_CHARS = 1024
MAX_DURATION_S = 86400.0
MAX_BANNED_TOKEN_IDS = 4096
MAX_SLOTS = 1 << 16


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    """Translate a layout."""
    return layout_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        block_size=layout.block_size,
        num_ranks=layout.num_ranks,
        rope_convention=layout.rope_convention,
        digest_algorithm=layout.digest_algorithm,
        speculation=layout.speculation,
        layers=[
            layout_pb2.KvLayer(
                components=[
                    layout_pb2.KvComponent(
                        name=component.name, dtype=component.dtype, row_bytes=component.row_bytes
                    )
                    for component in layer.components
                ]
            )
            for layer in layout.layers
        ],
    )


def layout_from_proto(message: layout_pb2.KvLayout) -> KvLayout:
    """Translate and check a layout.

    Raises:
        InvalidRequestError: A field is wrong.
    """
    for name in ("model_fingerprint", "rope_convention", "digest_algorithm", "speculation"):
        _check_name(f"layout.{name}", getattr(message, name), may_be_empty=name == "speculation")
    _check_count("layout.layers", len(message.layers), MAX_LAYERS)
    try:
        return KvLayout(
            model_fingerprint=message.model_fingerprint,
            block_size=message.block_size,
            num_ranks=message.num_ranks,
            rope_convention=message.rope_convention,
            digest_algorithm=message.digest_algorithm,
            speculation=message.speculation,
            layers=tuple(_layer_from_proto(layer) for layer in message.layers),
        )
    except FieldError as error:
        raise _invalid("layout", error) from error


def _layer_from_proto(message: layout_pb2.KvLayer) -> LayerLayout:
    _check_count("layout.layers.components", len(message.components), MAX_COMPONENTS)
    components = []
    for component in message.components:
        _check_name("layout.layers.components.name", component.name)
        _check_name("layout.layers.components.dtype", component.dtype)
        components.append(
            ComponentLayout(
                name=component.name, dtype=component.dtype, row_bytes=component.row_bytes
            )
        )
    return LayerLayout(components=tuple(components))


def region_to_proto(
    region: RegionMap | StagingMap, descriptor: TargetDescriptor
) -> layout_pb2.KvRegion:
    """Translate a target region or a staging ring; the message holds the access key."""
    message = layout_pb2.KvRegion(
        engine=descriptor.engine,
        address=descriptor.address,
        access_key=descriptor.access_key,
        size_bytes=region.size_bytes,
        num_blocks=region.num_blocks,
    )
    if isinstance(region, StagingMap):
        message.slot_bytes = region.slot_bytes
        message.num_slots = region.num_slots
        return message
    message.components.extend(
        layout_pb2.ComponentRegion(
            layer=component.layer,
            component=component.component,
            base_bytes=component.base_bytes,
            block_stride_bytes=component.block_stride_bytes,
        )
        for component in region.components
    )
    return message


def region_from_proto(
    message: layout_pb2.KvRegion,
) -> tuple[RegionMap | StagingMap, TargetDescriptor]:
    """Translate a target region or a staging ring; whether it fits the layout is checked by
    `placements` or `StagingMap.rows_per_slot`.

    Raises:
        InvalidRequestError: A field is wrong.
    """
    _check_name("region.engine", message.engine)
    if not 0 < len(message.address) <= MAX_ADDRESS_CHARS:
        raise InvalidRequestError(
            "region.address",
            f"{len(message.address)} characters",
            f"1 to {MAX_ADDRESS_CHARS} characters",
        )
    if len(message.access_key) > MAX_ACCESS_KEY_BYTES:
        raise InvalidRequestError(
            "region.access_key",
            f"{len(message.access_key)} bytes",
            f"at most {MAX_ACCESS_KEY_BYTES} bytes",
        )
    for name in ("size_bytes", "num_blocks"):
        if getattr(message, name) == 0:
            raise InvalidRequestError(f"region.{name}", 0, "at least 1")
    descriptor = TargetDescriptor(
        engine=message.engine,
        address=message.address,
        access_key=message.access_key,
        size_bytes=message.size_bytes,
    )
    if message.slot_bytes:
        return _staging_from_proto(message), descriptor
    _check_count("region.components", len(message.components), MAX_LAYERS * MAX_COMPONENTS)
    region = RegionMap(
        num_blocks=message.num_blocks,
        size_bytes=message.size_bytes,
        base_address=0,
        components=tuple(
            ComponentRegion(
                layer=component.layer,
                component=component.component,
                base_bytes=component.base_bytes,
                block_stride_bytes=component.block_stride_bytes,
            )
            for component in message.components
        ),
    )
    return region, descriptor


def _staging_from_proto(message: layout_pb2.KvRegion) -> StagingMap:
    ring = StagingMap(
        num_blocks=message.num_blocks, num_slots=message.num_slots, slot_bytes=message.slot_bytes
    )
    _check_count("region.components", len(message.components), 0, low=0)
    if not 1 <= ring.num_slots <= MAX_SLOTS:
        raise InvalidRequestError("region.num_slots", ring.num_slots, f"in [1, {MAX_SLOTS}]")
    if ring.size_bytes != message.size_bytes:
        raise InvalidRequestError(
            "region.size_bytes", message.size_bytes, f"{ring.size_bytes}, the size of all slots"
        )
    return ring


def ticket_to_proto(ticket: Ticket) -> handoff_pb2.Ticket:
    """Translate a ticket."""
    return handoff_pb2.Ticket(
        id=ticket.id,
        decode_incarnation=ticket.decode_incarnation,
        prefill_incarnation=ticket.prefill_incarnation,
        block_ids=ticket.block_ids,
        row_start=ticket.rows.start,
        row_end=ticket.rows.end,
        lease=duration(ticket.lease_s),
        mac=ticket.mac,
        slots=ticket.slots,
    )


def ticket_from_proto(message: handoff_pb2.Ticket) -> Ticket:
    """Translate and check a ticket; whether it fits a request is for the caller to check.

    Raises:
        InvalidRequestError: A field is wrong.
    """
    check_ticket_id(message.id)
    _check_name("ticket.decode_incarnation", message.decode_incarnation)
    _check_name("ticket.prefill_incarnation", message.prefill_incarnation)
    if len(message.mac) != MAC_BYTES:
        raise InvalidRequestError("ticket.mac", f"{len(message.mac)} bytes", f"{MAC_BYTES} bytes")
    if len(set(message.block_ids)) != len(message.block_ids):
        raise InvalidRequestError("ticket.block_ids", "a block listed twice", "unique ids")
    return Ticket(
        id=message.id,
        decode_incarnation=message.decode_incarnation,
        prefill_incarnation=message.prefill_incarnation,
        block_ids=tuple(message.block_ids),
        rows=_rows("ticket", message.row_start, message.row_end),
        lease_s=seconds("ticket.lease", message.lease),
        mac=message.mac,
        slots=slots_from_proto("ticket.slots", message.slots),
    )


def slots_from_proto(field: str, slots: Sequence[int], *, low: int = 0) -> tuple[int, ...]:
    """Check a list of slots; whether they are the ticket's is for the caller to check.

    Raises:
        InvalidRequestError: There are too few or too many, or one is listed twice.
    """
    _check_count(field, len(slots), MAX_SLOTS, low=low)
    if len(set(slots)) != len(slots):
        raise InvalidRequestError(field, "a slot listed twice", "unique slots")
    return tuple(slots)


def receipt_to_proto(receipt: Receipt) -> handoff_pb2.Receipt:
    """Translate a receipt."""
    return handoff_pb2.Receipt(
        ticket_id=receipt.ticket_id,
        ticket_mac=receipt.ticket_mac,
        layer=receipt.layer,
        component=receipt.component,
        rank=receipt.rank,
        chunk=receipt.chunk,
        row_start=receipt.rows.start,
        row_end=receipt.rows.end,
        size_bytes=receipt.size_bytes,
        digest=receipt.digest,
        slot=receipt.slot,
    )


def receipt_from_proto(message: handoff_pb2.Receipt) -> Receipt:
    """Translate and check a receipt; the reservation checks it against its grant.

    Raises:
        InvalidRequestError: A field is wrong.
    """
    check_ticket_id(message.ticket_id, field="receipt.ticket_id")
    is_staged = message.HasField("slot")
    _check_name("receipt.component", message.component, may_be_empty=is_staged)
    return Receipt(
        ticket_id=message.ticket_id,
        ticket_mac=message.ticket_mac,
        layer=message.layer,
        component=message.component,
        rank=message.rank,
        chunk=message.chunk,
        rows=_rows("receipt", message.row_start, message.row_end),
        size_bytes=message.size_bytes,
        digest=message.digest,
        slot=message.slot if is_staged else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampling:
    """How prefill samples the next token.

    Attributes:
        params: Temperature and filters; lengths and stops stay with decode.
        seed: Seed of the counter-based generator.
        banned_token_ids: Ids that cannot be sampled at this position.
    """

    params: SamplingParams
    seed: int
    banned_token_ids: tuple[int, ...]


def sampling_to_proto(
    params: SamplingParams, *, seed: int, banned_token_ids: Sequence[int]
) -> handoff_pb2.SamplingParams:
    """Translate what the next token needs."""
    return handoff_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed,
        banned_token_ids=banned_token_ids,
    )


def sampling_from_proto(
    message: handoff_pb2.SamplingParams, *, vocab_size: int
) -> FirstTokenSampling:
    """Translate and check what the next token needs.

    Raises:
        InvalidRequestError: A field is wrong.
    """
    _check_count(
        "sampling.banned_token_ids", len(message.banned_token_ids), MAX_BANNED_TOKEN_IDS, low=0
    )
    for token_id in message.banned_token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                "sampling.banned_token_ids", token_id, f"in [0, {vocab_size - 1}]"
            )
    params = SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
    )
    params.validate(vocab_size)
    return FirstTokenSampling(
        params=params, seed=message.seed, banned_token_ids=tuple(message.banned_token_ids)
    )


def duration(value_s: float) -> duration_pb2.Duration:
    """Translate seconds."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(max(0, round(value_s * 1e9)))
    return message


def seconds(field: str, message: duration_pb2.Duration) -> float:
    """Translate a duration into seconds.

    Raises:
        InvalidRequestError: It is not above zero, or above a day.
    """
    # ToNanoseconds is exact and raises on fields out of protobuf's own range.
    try:
        value_s = message.ToNanoseconds() / 1e9
    except ValueError:
        value_s = math.nan
    if not 0 < value_s <= MAX_DURATION_S:
        raise InvalidRequestError(field, f"{value_s} s", f"in (0 s, {MAX_DURATION_S:g} s]")
    return value_s


def check_ticket_id(ticket_id: bytes, *, field: str = "ticket.id") -> None:
    """Check the length of a ticket id.

    Raises:
        InvalidRequestError: It is not 16 bytes.
    """
    if len(ticket_id) != TICKET_ID_BYTES:
        raise InvalidRequestError(field, f"{len(ticket_id)} bytes", f"{TICKET_ID_BYTES} bytes")


def _rows(field: str, start: int, end: int) -> RowRange:
    if start >= end:
        raise InvalidRequestError(f"{field}.row_end", end, f"above row_start = {start}")
    try:
        return RowRange(start, end)
    except FieldError as error:
        raise _invalid(field, error) from error


def _check_name(field: str, value: str, *, may_be_empty: bool = False) -> None:
    if len(value) > MAX_NAME_CHARS or not (value or may_be_empty):
        raise InvalidRequestError(
            field, f"{len(value)} characters", f"1 to {MAX_NAME_CHARS} characters"
        )


def _check_count(field: str, count: int, limit: int, *, low: int = 1) -> None:
    if not low <= count <= limit:
        raise InvalidRequestError(field, f"{count} entries", f"{low} to {limit} entries")


def _invalid(prefix: str, error: FieldError) -> InvalidRequestError:
    return InvalidRequestError(f"{prefix}.{error.field}", error.value, error.limit)
