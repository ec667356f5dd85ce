"""Packing into slots and copying out of them, against a naive copy row by row."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_transfer.landing
from kv_transfer.digest import digest_rows
from kv_transfer.errors import (
    DigestMismatchError,
    LayoutError,
    ReceiptFieldError,
    ReceiptOverlapError,
)
from kv_transfer.landing import PoolMemory, StagedRows
from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    KvLayout,
    LayerLayout,
    RegionMap,
    StagingMap,
    placements,
    with_block_size,
)
from kv_transfer.push_job import PushItem, PushJob
from kv_transfer.push_plan import StagedPlan
from kv_transfer.spans import ByteSpan, RowRange
from kv_transfer.ticket import Receipt, TicketIssuer
from tests.support.push_pair import FakeEvent, PushLog
from tests.support.staged_pair import ROW_BYTES, StagedPair

BLOCKS, SOURCE_BLOCKS, ROWS = (7, 2, 9), (3, 11, 0), RowRange(1, 11)


# How many rows a slot holds.


def test_rows_per_slot_counts_all_components_of_each_layer() -> None:
    layout = StagedPair().layout  # rows of 40 and of 34 bytes
    for slot_bytes, expected in ((40, (1, 1)), (79, (1, 2)), (80, (2, 2)), (102, (2, 3))):
        ring = StagingMap(num_blocks=1, num_slots=1, slot_bytes=slot_bytes)
        assert ring.rows_per_slot(layout) == expected
        assert ring.size_bytes == slot_bytes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_blocks": 0}, "region.num_blocks"),
        ({"num_slots": 0}, "region.num_slots"),
        ({"slot_bytes": 39}, "region.slot_bytes"),
    ],
)
def test_rows_per_slot_refuses_what_cannot_hold_a_row(change: dict[str, int], field: str) -> None:
    ring = replace(StagingMap(num_blocks=1, num_slots=1, slot_bytes=40), **change)
    with pytest.raises(LayoutError) as caught:
        ring.rows_per_slot(StagedPair().layout)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("slots", "is_good"),
    [((0,), True), ((3, 1), True), ((), False), ((4,), False), ((-1,), False), ((1, 1), False)],
)
def test_plan_refuses_slots_that_are_not_in_the_ring(slots: tuple[int, ...], is_good: bool) -> None:
    pair = StagedPair(num_slots=4)
    plan = StagedPlan(pair.source.region, pair.ring, pair.layout)
    if is_good:
        plan.check_slots(slots)
        return
    with pytest.raises(LayoutError) as caught:
        plan.check_slots(slots)
    assert caught.value.field == "ticket.slots"


def test_direct_plan_refuses_slots() -> None:
    pair = StagedPair()
    direct = kv_transfer.push_plan.DirectPlan(
        pair.source.region, pair.source.region, pair.layout, pair.layout.block_size
    )
    with pytest.raises(LayoutError):
        direct.check_slots((0,))


# Packing and copying, for any layout.


class Model:
    """A random layout with a source, a ring and a pool, filled by a pure function."""

    def __init__(self, draw: st.DrawFn) -> None:
        components = st.lists(st.integers(1, 33), min_size=1, max_size=3)
        sizes = draw(st.lists(components, min_size=1, max_size=3))
        self.source_block_size = draw(st.integers(1, 5))
        self.target_block_size = draw(st.integers(1, 5))
        self.layout = KvLayout(
            model_fingerprint="model",
            block_size=self.source_block_size,
            layers=tuple(
                LayerLayout(
                    components=tuple(
                        ComponentLayout(name=f"c{index}", dtype="uint8", row_bytes=row_bytes)
                        for index, row_bytes in enumerate(layer)
                    )
                )
                for layer in sizes
            ),
        )
        start = draw(st.integers(0, 9))
        self.rows = RowRange(start, start + draw(st.integers(1, 12)))
        self.source_blocks = self._blocks(draw, self.source_block_size)
        self.target_blocks = self._blocks(draw, self.target_block_size)
        widest = max(sum(layer) for layer in sizes)
        self.ring = StagingMap(
            num_blocks=max(self.target_blocks) + 1,
            num_slots=3,
            slot_bytes=widest * draw(st.integers(1, 15)) + draw(st.integers(0, 7)),
        )
        padding = draw(st.integers(0, 3))
        self.source = self._memory(self.source_block_size, self.source_blocks, padding)
        self.pool = self._memory(self.target_block_size, self.target_blocks, padding)
        self.ring_memory = bytearray(self.ring.size_bytes)

    def _blocks(self, draw: st.DrawFn, block_size: int) -> tuple[int, ...]:
        num_blocks = -(-self.rows.end // block_size)
        return tuple(draw(st.permutations(range(num_blocks + 2)))[:num_blocks])

    def _memory(self, block_size: int, blocks: tuple[int, ...], padding: int) -> bytearray:
        return bytearray(self.region(block_size, max(blocks) + 1, padding).size_bytes)

    def region(self, block_size: int, num_blocks: int, padding: int, base: int = 0) -> RegionMap:
        """Components one after the other, with gaps between blocks."""
        entries, at = [], 1
        for layer, parts in enumerate(self.layout.layers):
            for component in parts.components:
                stride = component.row_bytes * block_size + padding
                entries.append(
                    ComponentRegion(
                        layer=layer,
                        component=component.name,
                        base_bytes=at,
                        block_stride_bytes=stride,
                    )
                )
                at += stride * num_blocks
        return RegionMap(
            num_blocks=num_blocks, size_bytes=at, base_address=base, components=tuple(entries)
        )


def content(layer: int, name: str, row: int, num_bytes: int) -> bytes:
    """What a row holds."""
    return hashlib.shake_128(f"{layer}/{name}/{row}".encode()).digest(num_bytes)


def row_start(region: RegionMap, place: tuple[int, str], at: tuple[int, int, int]) -> int:
    """Where a row begins; `at` is its block, its place in the block, and its bytes."""
    block, row_in_block, row_bytes = at
    for entry in region.components:
        if (entry.layer, entry.component) == place:
            return entry.base_bytes + block * entry.block_stride_bytes + row_in_block * row_bytes
    raise AssertionError(place)


def address_of(memory: bytearray) -> int:
    """Where it lies."""
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rows_packed_by_one_side_are_put_into_the_right_blocks_by_the_other(
    data: st.DataObject,
) -> None:
    model = data.draw(st.composite(Model)())
    padding = 2
    source_region = model.region(model.source_block_size, max(model.source_blocks) + 1, padding)
    model.source = bytearray(source_region.size_bytes)
    target_region = model.region(model.target_block_size, model.ring.num_blocks, padding)
    model.pool = bytearray(target_region.size_bytes)
    expected = bytearray(target_region.size_bytes)
    for layer, parts in enumerate(model.layout.layers):
        for component in parts.components:
            for row in range(model.rows.end):
                text = content(layer, component.name, row, component.row_bytes)
                for memory, region, blocks, size in (
                    (model.source, source_region, model.source_blocks, model.source_block_size),
                    (expected, target_region, model.target_blocks, model.target_block_size),
                ):
                    if memory is expected and row < model.rows.start:
                        continue
                    where = (blocks[row // size], row % size, component.row_bytes)
                    start = row_start(region, (layer, component.name), where)
                    memory[start : start + component.row_bytes] = text

    source_address = address_of(model.source)
    plan = StagedPlan(replace(source_region, base_address=source_address), model.ring, model.layout)
    layout = with_block_size(model.layout, model.target_block_size)
    landing = StagedRows(
        places=placements(target_region, layout),
        layout=layout,
        pool=PoolMemory(view=memoryview(model.pool), address=address_of(model.pool)),
        ring=model.ring,
        ring_memory=memoryview(model.ring_memory),
    )
    ticket = TicketIssuer("decode-1").issue(
        prefill_incarnation="prefill-1",
        block_ids=model.target_blocks,
        rows=model.rows,
        lease_s=1.0,
        slots=(2, 0),
    )
    log = PushLog()
    job = log.job(ticket, model.source_blocks)
    for layer, parts in enumerate(model.layout.layers):
        max_rows = plan.max_rows(layer)
        assert max_rows == model.ring.slot_bytes // parts.row_bytes
        start = model.rows.start
        while start < model.rows.end:
            rows = RowRange(start, min(start + max_rows, model.rows.end))
            start = rows.end
            receipt = write_and_report(model, plan, job, layer, rows)
            check = landing.check(receipt, ticket)
            assert check.land() == receipt.digest
    assert model.pool == expected


def write_and_report(
    model: Model, plan: StagedPlan, job: PushJob, layer: int, rows: RowRange
) -> Receipt:
    """Carry out the writes of an item by hand."""
    slot = job.ticket.slots[rows.start % 2]
    item = PushItem(
        layer=layer, rows=rows, chunk=0, event=FakeEvent(), sequence=0, deadline_s=0.0, slot=slot
    )
    (write,) = plan.writes(job, item)
    packed = packed_rows(model.layout, layer, rows)
    start = slot * model.ring.slot_bytes
    at = start
    for source, target, num_bytes in write.copies:
        assert target == at, "packed without a gap from the beginning of the slot"
        model.ring_memory[target : target + num_bytes] = ctypes.string_at(source, num_bytes)
        at += num_bytes
    assert (write.component, write.num_bytes) == ("", at - start)
    assert model.ring_memory[start:at] == packed
    return Receipt(
        ticket_id=job.ticket.id,
        ticket_mac=job.ticket.mac,
        layer=layer,
        component="",
        rank=0,
        chunk=0,
        rows=rows,
        size_bytes=write.num_bytes,
        digest=xxhash.xxh3_64_intdigest(packed),
        slot=slot,
    )


def packed_rows(layout: KvLayout, layer: int, rows: RowRange) -> bytes:
    """Component after component, row after row."""
    return b"".join(
        content(layer, component.name, row, component.row_bytes)
        for component in layout.layers[layer].components
        for row in range(rows.start, rows.end)
    )


# What a landing refuses.


def pushed(pair: StagedPair) -> tuple[list[Receipt], PushLog]:
    """The receipts of a prompt whose every item fits one slot of its own."""
    pair.source.view.fill("a", SOURCE_BLOCKS, ROWS.end)
    log = PushLog()
    reservation = pair.reserve(BLOCKS, ROWS, (0, 1, 2, 3))
    job = log.job(reservation.ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    pair.pump()
    assert [receipt.slot for receipt in log.receipts] == [0, 1, 2, 3]
    return log.receipts, log


@pytest.fixture
def pair() -> StagedPair:
    return StagedPair(rows_per_slot=5)


def reservation_of(pair: StagedPair) -> kv_transfer.receiver.Reservation:
    """The only one."""
    (reservation,) = pair.table.reservations()
    return reservation


def test_landing_receipts_of_all_slots_completes_the_grant(pair: StagedPair) -> None:
    receipts, _ = pushed(pair)
    assert [receipt.component for receipt in receipts] == [""] * 4
    assert not any(pair.pool)
    reservation = reservation_of(pair)
    for receipt in receipts:
        assert not reservation.is_complete
        reservation.accept(receipt)
    assert reservation.is_complete
    assert pair.view.holds("a", BLOCKS, range(ROWS.start, ROWS.end))


@pytest.mark.parametrize("at", [0, 4 * ROW_BYTES, 5 * ROW_BYTES - 1])
def test_landing_wrong_bytes_in_a_slot_copies_nothing(pair: StagedPair, at: int) -> None:
    receipts, _ = pushed(pair)
    pair.target.buffer[at] ^= 1
    with pytest.raises(DigestMismatchError):
        reservation_of(pair).accept(receipts[0])
    assert not any(pair.pool)


def test_landing_bytes_behind_the_rows_of_a_slot_do_not_matter(pair: StagedPair) -> None:
    receipts, _ = pushed(pair)
    pair.target.buffer[5 * ROW_BYTES] ^= 1
    reservation_of(pair).accept(receipts[0])


def test_landing_a_write_between_look_and_copy_reaches_no_block(
    pair: StagedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's port is open to others: what is copied must be what was looked at."""
    receipts, _ = pushed(pair)

    def digest_then_late_write(memory: memoryview, spans: Sequence[ByteSpan]) -> int:
        digest = digest_rows(memory, spans)
        pair.target.buffer[:] = b"\xff" * len(pair.target.buffer)
        return digest

    monkeypatch.setattr(kv_transfer.landing, "digest_rows", digest_then_late_write)
    reservation = reservation_of(pair)
    reservation.accept(receipts[0])
    first = receipts[0].rows
    for layer, component in pair.view.places():
        if layer == receipts[0].layer:
            for row in range(first.start, first.end):
                held = pair.view.row(layer, component, BLOCKS, row)
                assert bytes(held) != b"\xff" * len(held)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slot": None}, "slot"),
        ({"slot": 4}, "slot"),
        ({"slot": 2**32 - 1}, "slot"),
        ({"component": "latent"}, "component"),
        ({"layer": 2}, "layer"),
        ({"layer": 2**32 - 1}, "layer"),
        ({"rows": RowRange(0, 5)}, "rows"),
        ({"rows": RowRange(7, 12)}, "rows"),
        ({"size_bytes": 5 * ROW_BYTES - 1}, "size_bytes"),
        ({"size_bytes": 2**63}, "size_bytes"),
        # More rows than a slot holds, with a size that fits them.
        ({"rows": RowRange(1, 8), "size_bytes": 7 * ROW_BYTES}, "size_bytes"),
    ],
)
def test_landing_hostile_receipt_is_refused_by_name_and_claims_no_row(
    pair: StagedPair, change: dict[str, object], field: str
) -> None:
    receipts, _ = pushed(pair)
    reservation = reservation_of(pair)
    with pytest.raises(ReceiptFieldError) as caught:
        reservation.accept(replace(receipts[0], **change))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not any(pair.pool)
    for receipt in receipts:
        reservation.accept(receipt)
    assert reservation.is_complete


def test_landing_slot_of_another_ticket_is_refused(pair: StagedPair) -> None:
    pair.source.view.fill("a", SOURCE_BLOCKS, ROWS.end)
    first = pair.reserve(BLOCKS, ROWS, (0, 1))
    pair.reserve((0, 1, 3), ROWS, (2, 3))
    log = PushLog()
    job = log.job(first.ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    pair.pump()
    with pytest.raises(ReceiptFieldError, match="slot"):
        first.accept(replace(log.receipts[0], slot=2))


def test_landing_overlapping_rows_are_refused_in_every_component(pair: StagedPair) -> None:
    receipts, _ = pushed(pair)
    reservation = reservation_of(pair)
    reservation.accept(receipts[0])
    again = replace(receipts[0], slot=1, rows=RowRange(5, 10))
    with pytest.raises(ReceiptOverlapError):
        reservation.accept(again)


def test_direct_landing_refuses_a_slot_and_a_receipt_for_a_whole_layer(pair: StagedPair) -> None:
    receipts, _ = pushed(pair)
    ticket = pair.issuer.issue(
        prefill_incarnation="prefill-1", block_ids=(0, 1, 3), rows=ROWS, lease_s=1.0
    )
    direct = pair.table.reserve(ticket, peer="peer")
    hostile = replace(receipts[0], ticket_id=ticket.id, ticket_mac=ticket.mac)
    with pytest.raises(ReceiptFieldError, match="component"):
        direct.accept(hostile)
    one = replace(hostile, component="latent", size_bytes=5 * 24)
    with pytest.raises(ReceiptFieldError, match="slot"):
        direct.accept(one)
