"""The wire: round trips, refusals by name, and nothing but InvalidRequestError for any message."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.engine.base import TargetDescriptor
from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    KvLayout,
    LayerLayout,
    RegionMap,
    StagingMap,
)
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, TicketIssuer
from serving_core.errors import InvalidRequestError
from serving_core.request import SamplingParams
from serving_core.rpc import wire
from tandem.v1 import handoff_pb2, layout_pb2

LAYOUT = KvLayout(
    model_fingerprint="f" * 64,
    block_size=16,
    layers=(
        LayerLayout(
            components=(
                ComponentLayout(name="latent", dtype="float32", row_bytes=256),
                ComponentLayout(name="index_key", dtype="float32", row_bytes=128),
            )
        ),
        LayerLayout(components=(ComponentLayout(name="latent", dtype="float32", row_bytes=256),)),
    ),
)
REGION = RegionMap(
    num_blocks=4,
    size_bytes=65536,
    base_address=0,
    components=(ComponentRegion(layer=0, component="latent", base_bytes=64, block_stride_bytes=8),),
)
DESCRIPTOR = TargetDescriptor(
    engine="shm", address="/run/socket", access_key=b"k" * 32, size_bytes=65536
)
RING = StagingMap(num_blocks=4, num_slots=16, slot_bytes=4096)
TICKET = TicketIssuer("decode-1").issue(
    prefill_incarnation="prefill-1", block_ids=(3, 1, 2), rows=RowRange(5, 40), lease_s=2.5
)
RECEIPT = Receipt(
    ticket_id=TICKET.id,
    ticket_mac=TICKET.mac,
    layer=1,
    component="latent",
    rank=0,
    chunk=2,
    rows=RowRange(5, 21),
    size_bytes=4096,
    digest=2**64 - 1,
)


def test_messages_survive_the_wire() -> None:
    assert wire.layout_from_proto(wire.layout_to_proto(LAYOUT)) == LAYOUT
    assert wire.region_from_proto(wire.region_to_proto(REGION, DESCRIPTOR)) == (REGION, DESCRIPTOR)
    assert wire.ticket_from_proto(wire.ticket_to_proto(TICKET)) == TICKET
    assert wire.receipt_from_proto(wire.receipt_to_proto(RECEIPT)) == RECEIPT


def test_staging_messages_survive_the_wire() -> None:
    assert wire.region_from_proto(wire.region_to_proto(RING, DESCRIPTOR)) == (RING, DESCRIPTOR)
    ticket = dataclasses.replace(TICKET, slots=(3, 0, 2**32 - 1))
    assert wire.ticket_from_proto(wire.ticket_to_proto(ticket)) == ticket
    for slot in (0, 2**32 - 1):
        receipt = dataclasses.replace(RECEIPT, component="", slot=slot)
        assert wire.receipt_from_proto(wire.receipt_to_proto(receipt)) == receipt


def test_receipt_without_component_needs_a_slot() -> None:
    message = wire.receipt_to_proto(dataclasses.replace(RECEIPT, component=""))
    with pytest.raises(InvalidRequestError) as caught:
        wire.receipt_from_proto(message)
    assert caught.value.field == "receipt.component"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_slots": 0}, "region.num_slots"),
        ({"num_slots": 2**32 - 1, "size_bytes": 2**32 - 1, "slot_bytes": 1}, "region.num_slots"),
        ({"slot_bytes": 4095}, "region.size_bytes"),
        ({"slot_bytes": 2**64 - 1}, "region.size_bytes"),
        ({"num_slots": 15}, "region.size_bytes"),
        ({"num_blocks": 0}, "region.num_blocks"),
        ({"components": [layout_pb2.ComponentRegion(component="x")]}, "region.components"),
    ],
)
def test_wrong_field_of_a_ring_is_named(change: dict[str, Any], field: str) -> None:
    message = wire.region_to_proto(RING, DESCRIPTOR)
    for name, value in change.items():
        message.ClearField(name)
        message.MergeFrom(layout_pb2.KvRegion(**{name: value}))
    with pytest.raises(InvalidRequestError) as caught:
        wire.region_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("slots", "low", "is_good"),
    [
        ((), 0, True),
        ((), 1, False),
        ((1, 1), 0, False),
        (range(wire.MAX_SLOTS), 1, True),
        (range(wire.MAX_SLOTS + 1), 0, False),
    ],
)
def test_list_of_slots_is_bounded_and_has_none_twice(
    slots: Any, low: int, *, is_good: bool
) -> None:
    if is_good:
        assert wire.slots_from_proto("slots", slots, low=low) == tuple(slots)
        return
    with pytest.raises(InvalidRequestError) as caught:
        wire.slots_from_proto("slots", slots, low=low)
    assert caught.value.field == "slots"


def test_sampling_survives_the_wire() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    message = wire.sampling_to_proto(params, seed=2**64 - 1, banned_token_ids=(2, 7))
    read = wire.sampling_from_proto(message, vocab_size=8)
    assert read.params == params
    assert (read.seed, read.banned_token_ids) == (2**64 - 1, (2, 7))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": b"short"}, "ticket.id"),
        ({"mac": b""}, "ticket.mac"),
        ({"block_ids": [1, 2, 1]}, "ticket.block_ids"),
        ({"slots": [1, 2, 1]}, "ticket.slots"),
        ({"slots": range(wire.MAX_SLOTS + 1)}, "ticket.slots"),
        ({"row_end": 5}, "ticket.row_end"),
        ({"lease": duration_pb2.Duration()}, "ticket.lease"),
        ({"lease": duration_pb2.Duration(seconds=10**9)}, "ticket.lease"),
        ({"decode_incarnation": ""}, "ticket.decode_incarnation"),
        ({"prefill_incarnation": "x" * 300}, "ticket.prefill_incarnation"),
    ],
)
def test_wrong_field_of_a_ticket_is_named(change: dict[str, Any], field: str) -> None:
    message = wire.ticket_to_proto(TICKET)
    for name, value in change.items():
        message.ClearField(name)
        message.MergeFrom(handoff_pb2.Ticket(**{name: value}))
    with pytest.raises(InvalidRequestError) as caught:
        wire.ticket_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["block_size", "num_ranks", "model_fingerprint", "layers"])
def test_missing_field_of_a_layout_is_refused(name: str) -> None:
    message = wire.layout_to_proto(LAYOUT)
    message.ClearField(name)
    with pytest.raises(InvalidRequestError):
        wire.layout_from_proto(message)


@pytest.mark.parametrize("change", [{"temperature": -1.0}, {"top_p": 0.0}, {"banned": 8}])
def test_wrong_sampling_is_refused(change: dict[str, Any]) -> None:
    message = wire.sampling_to_proto(SamplingParams(), seed=1, banned_token_ids=())
    if "banned" in change:
        message.banned_token_ids.append(change["banned"])
    else:
        for name, value in change.items():
            setattr(message, name, value)
    with pytest.raises(InvalidRequestError):
        wire.sampling_from_proto(message, vocab_size=8)


def test_secrets_do_not_show_in_representations() -> None:
    for secret in (DESCRIPTOR, TICKET, RECEIPT):
        text = repr(secret)
        assert "kkkk" not in text
        assert repr(TICKET.mac) not in text
        assert dataclasses.is_dataclass(secret)


@given(st.binary(max_size=400))
@settings(max_examples=400, deadline=None)
def test_random_bytes_raise_nothing_but_invalid_request(data: bytes) -> None:
    """I15: a frame is either no message, a good one, or refused by name."""
    readers = (
        (layout_pb2.KvLayout, wire.layout_from_proto),
        (layout_pb2.KvRegion, wire.region_from_proto),
        (handoff_pb2.Ticket, wire.ticket_from_proto),
        (handoff_pb2.Receipt, wire.receipt_from_proto),
        (handoff_pb2.SamplingParams, lambda m: wire.sampling_from_proto(m, vocab_size=8)),
    )
    for kind, read in readers:
        with contextlib.suppress(DecodeError, InvalidRequestError):
            read(kind.FromString(data))


@given(
    st.builds(
        handoff_pb2.Receipt,
        ticket_id=st.binary(max_size=20),
        component=st.text(max_size=300),
        layer=st.integers(0, 2**32 - 1),
        row_start=st.integers(0, 2**32 - 1),
        row_end=st.integers(0, 2**32 - 1),
        size_bytes=st.integers(0, 2**64 - 1),
        digest=st.integers(0, 2**64 - 1),
        slot=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    )
)
@settings(max_examples=200, deadline=None)
def test_random_receipts_raise_nothing_but_invalid_request(message: handoff_pb2.Receipt) -> None:
    try:
        receipt = wire.receipt_from_proto(message)
    except InvalidRequestError:
        return
    assert len(receipt.rows) > 0
