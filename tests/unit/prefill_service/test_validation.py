"""What a handshake must say about the memory that is to be pushed into."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.engine.base import TargetDescriptor
from kv_transfer.layout import StagingMap
from prefill_service.sessions import Peer
from prefill_service.validation import parse_handshake
from serving_core.errors import InvalidRequestError, LayoutMismatchError
from serving_core.rpc import wire
from tandem.v1 import prefill_service_pb2 as pb
from tests.support.kv_pools import make_layout, make_region

LAYOUT = make_layout()
REGION = make_region(LAYOUT, num_blocks=6)
RING = StagingMap(num_blocks=6, num_slots=3, slot_bytes=64)


def handshake(
    region: Any, *, can_fence_writer: bool, engine: str = "mooncake", **changes: int
) -> Peer:
    """Parse a handshake for that region."""
    descriptor = TargetDescriptor(
        engine=engine, address="here:1", access_key=b"k" * 32, size_bytes=region.size_bytes
    )
    request = pb.HandshakeRequest(
        protocol_version=1,
        decode_incarnation="decode-1",
        layout=wire.layout_to_proto(LAYOUT),
        region=wire.region_to_proto(region, descriptor),
        max_model_len=64,
    )
    for name, value in changes.items():
        setattr(request.region, name, value)
    return parse_handshake(
        request,
        protocol_version=1,
        layout=LAYOUT,
        engine_name="mooncake",
        can_fence_writer=can_fence_writer,
    )


def test_engine_that_cannot_fence_takes_a_ring() -> None:
    assert handshake(RING, can_fence_writer=False).region == RING


def test_engine_that_cannot_fence_is_never_let_into_blocks() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        handshake(REGION, can_fence_writer=False)
    assert caught.value.field == "region.slot_bytes"


def test_engine_that_can_fence_takes_both() -> None:
    assert handshake(REGION, can_fence_writer=True).region == REGION
    assert handshake(RING, can_fence_writer=True).region == RING


def test_ring_whose_slots_hold_no_row_is_refused() -> None:
    ring = StagingMap(num_blocks=6, num_slots=3, slot_bytes=39)
    with pytest.raises(InvalidRequestError) as caught:
        handshake(ring, can_fence_writer=False)
    assert caught.value.field == "region.slot_bytes"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_slots": 4}, "region.size_bytes"),
        ({"num_slots": 0}, "region.num_slots"),
        ({"num_blocks": 0}, "region.num_blocks"),
        ({"slot_bytes": 0}, "region.components"),
    ],
)
def test_wrong_field_of_a_ring_is_named(changes: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        handshake(RING, can_fence_writer=False, **changes)
    assert caught.value.field == field


def test_another_engine_is_a_mismatch() -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        handshake(RING, can_fence_writer=False, engine="shm")
    assert caught.value.field == "region.engine"
