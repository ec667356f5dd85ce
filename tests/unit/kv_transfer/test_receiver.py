"""Reservations and their table: what is accepted, and when blocks come back."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.errors import (
    DigestMismatchError,
    IllegalTransitionError,
    IncompleteError,
    LayoutError,
    QuarantineFullError,
    ReceiptFieldError,
    ReceiptOverlapError,
    ReceiptStateError,
    StaleTicketError,
    TicketMacError,
)
from kv_transfer.receiver import ReapAction, ReapKind, Released, Reservation
from kv_transfer.session import ReservationState
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, TicketIssuer
from tests.support.push_pair import LEASE_S, PEER, PREFILL, PushLog, PushPair

ROWS = RowRange(1, 11)
BLOCKS = (3, 4, 0)


@pytest.fixture
def pair() -> PushPair:
    made = PushPair()
    made.source.view.fill("a", (7, 2, 5), 12)
    return made


@pytest.fixture
def reservation(pair: PushPair) -> Reservation:
    return pair.reserve(BLOCKS, ROWS)


@pytest.fixture
def receipts(pair: PushPair, reservation: Reservation) -> list[Receipt]:
    """What an honest push of the whole grant in two chunks reports."""
    log = PushLog()
    job = log.job(reservation.ticket, (7, 2, 5))
    pair.pipeline.open(job)
    pair.submit_layers(job, RowRange(1, 6), chunk=0)
    pair.submit_layers(job, RowRange(6, 11), chunk=1)
    pair.pump()
    return log.receipts


def accept_all(reservation: Reservation, receipts: list[Receipt]) -> None:
    for receipt in receipts:
        reservation.accept(receipt)


def test_receipts_in_any_order_complete_the_grant_with_the_last_one(
    reservation: Reservation, receipts: list[Receipt]
) -> None:
    assert reservation.state is ReservationState.RESERVED
    for receipt in reversed(receipts):
        assert not reservation.is_complete
        reservation.accept(receipt)
        assert reservation.state is ReservationState.RECEIVING
    assert reservation.is_complete


def test_receipt_is_not_landed_before_its_digest_is_confirmed(
    reservation: Reservation, receipts: list[Receipt]
) -> None:
    checks = [reservation.begin(receipt) for receipt in receipts]
    assert not reservation.is_complete
    for check in checks:
        reservation.confirm(check, check.land())
    assert reservation.is_complete


@pytest.mark.parametrize("which", range(10))
def test_receipt_of_memory_with_one_flipped_bit_is_refused_naming_the_place(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt], which: int
) -> None:
    receipt = receipts[which]
    pair.view.row(receipt.layer, receipt.component, BLOCKS, receipt.rows.end - 1)[-1] ^= 0x10
    with pytest.raises(DigestMismatchError) as caught:
        reservation.accept(receipt)
    assert (caught.value.layer, caught.value.component) == (receipt.layer, receipt.component)
    assert caught.value.retryable
    with pytest.raises(DigestMismatchError):
        accept_all(pair.reserve((8, 9, 10), ROWS), [_for(pair, receipt)])


def _for(pair: PushPair, receipt: Receipt) -> Receipt:
    """The receipt under the newest ticket, whose blocks were never written."""
    ticket = pair.table.reservations()[-1].ticket
    return replace(receipt, ticket_id=ticket.id, ticket_mac=ticket.mac)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer": 2}, "component"),
        ({"layer": -1}, "component"),
        ({"component": "index_scale"}, "component"),
        ({"layer": 1, "component": "index_key"}, "component"),
        ({"rank": 1}, "rank"),
        ({"rank": -1}, "rank"),
        ({"chunk": -1}, "chunk"),
        ({"rows": RowRange(0, 5), "size_bytes": 120}, "rows"),
        ({"rows": RowRange(10, 12), "size_bytes": 48}, "rows"),
        ({"size_bytes": 119}, "size_bytes"),
        ({"size_bytes": 0}, "size_bytes"),
    ],
)
def test_receipt_with_a_field_outside_the_grant_is_refused(
    reservation: Reservation, receipts: list[Receipt], change: dict[str, object], field: str
) -> None:
    with pytest.raises(ReceiptFieldError) as caught:
        reservation.accept(replace(receipts[0], **change))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert reservation.state is ReservationState.RESERVED


def test_receipt_twice_is_refused(reservation: Reservation, receipts: list[Receipt]) -> None:
    reservation.accept(receipts[0])
    with pytest.raises(ReceiptOverlapError, match="layer 0 component latent"):
        reservation.accept(receipts[0])


def test_receipt_overlapping_one_that_is_still_checked_is_refused(
    reservation: Reservation, receipts: list[Receipt]
) -> None:
    reservation.begin(receipts[0])
    overlapping = replace(receipts[0], rows=RowRange(5, 7), size_bytes=48)
    with pytest.raises(ReceiptOverlapError):
        reservation.begin(overlapping)


def test_receipt_under_another_ticket_or_code_is_refused(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt]
) -> None:
    other = pair.reserve((8, 9, 10), ROWS).ticket
    with pytest.raises(StaleTicketError):
        reservation.accept(replace(receipts[0], ticket_id=other.id, ticket_mac=other.mac))
    with pytest.raises(TicketMacError):
        reservation.accept(replace(receipts[0], ticket_mac=other.mac))


def test_receipt_after_revoke_is_refused_also_when_its_check_had_begun(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt]
) -> None:
    check = reservation.begin(receipts[0])
    pair.table.begin_revoke(reservation.ticket.id)
    with pytest.raises(ReceiptStateError):
        reservation.confirm(check, check.land())
    with pytest.raises(StaleTicketError):
        reservation.accept(receipts[1])


def test_commit_before_the_rows_tile_the_grant_is_refused(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt]
) -> None:
    accept_all(reservation, receipts[:-1])
    with pytest.raises(IncompleteError, match="5 rows"):
        pair.table.commit(reservation.ticket.id)
    assert reservation.state is ReservationState.RECEIVING


def test_commit_then_close_gives_the_blocks_back_once(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt]
) -> None:
    ticket_id = reservation.ticket.id
    accept_all(reservation, receipts)
    with pytest.raises(IllegalTransitionError):
        pair.table.close(ticket_id)
    pair.table.commit(ticket_id)
    with pytest.raises(IllegalTransitionError):
        pair.table.commit(ticket_id)
    with pytest.raises(IllegalTransitionError):
        pair.table.begin_revoke(ticket_id)
    with pytest.raises(StaleTicketError):
        reservation.accept(receipts[0])
    released = pair.table.close(ticket_id)
    assert released == Released(ticket_id=ticket_id, block_ids=BLOCKS, was_quarantined=False)
    assert len(pair.table) == 0
    with pytest.raises(StaleTicketError):
        pair.table.close(ticket_id)
    pair.reserve(BLOCKS, ROWS)


def test_blocks_of_a_revoked_ticket_are_taken_until_it_is_drained(
    pair: PushPair, reservation: Reservation
) -> None:
    ticket_id = reservation.ticket.id
    assert pair.table.begin_revoke(ticket_id)
    assert not pair.table.begin_revoke(ticket_id)
    with pytest.raises(LayoutError, match="no other reservation"):
        pair.reserve((0, 1, 2), ROWS)
    assert pair.table.drained(ticket_id) == Released(
        ticket_id=ticket_id, block_ids=BLOCKS, was_quarantined=False
    )
    assert pair.table.drained(ticket_id) is None
    assert reservation.state is ReservationState.FREED
    pair.reserve((0, 1, 2), ROWS)


def test_drained_without_a_revoke_is_refused(pair: PushPair, reservation: Reservation) -> None:
    with pytest.raises(IllegalTransitionError):
        pair.table.drained(reservation.ticket.id)


def test_writer_dead_frees_its_revoked_tickets_only(pair: PushPair) -> None:
    revoked, quarantined, running = (
        pair.reserve(blocks, RowRange(0, 4)) for blocks in ((0,), (1,), (2,))
    )
    for reservation in (revoked, quarantined):
        pair.table.begin_revoke(reservation.ticket.id)
    pair.table.quarantine(quarantined.ticket.id)
    assert pair.table.writer_dead("somebody else") == []
    assert [(r.block_ids, r.was_quarantined) for r in pair.table.writer_dead(PREFILL)] == [
        ((0,), False),
        ((1,), True),
    ]
    assert pair.table.reservations() == [running]
    assert pair.table.num_quarantined_blocks(PEER) == 0


def test_quarantine_at_the_cap_refuses_that_peer_and_no_other(pair: PushPair) -> None:
    for blocks in ((0, 1, 2), (3, 4, 5)):
        ticket_id = pair.reserve(blocks, ROWS).ticket.id
        pair.table.begin_revoke(ticket_id)
        assert pair.table.quarantine(ticket_id) == blocks
    assert pair.table.num_quarantined_blocks(PEER) == 6
    with pytest.raises(QuarantineFullError, match=PEER):
        pair.reserve((6, 7, 8), ROWS)
    ticket = pair.issuer.issue(
        prefill_incarnation="p2", block_ids=(6, 7, 8), rows=ROWS, lease_s=1.0
    )
    pair.table.reserve(ticket, peer="another")
    pair.table.drained(ticket_id)
    pair.reserve((9, 10, 11), ROWS)


def test_quarantine_of_a_running_ticket_is_refused(
    pair: PushPair, reservation: Reservation
) -> None:
    with pytest.raises(IllegalTransitionError):
        pair.table.quarantine(reservation.ticket.id)


def test_reap_over_time_asks_for_each_step_and_frees_nothing(
    pair: PushPair, reservation: Reservation
) -> None:
    ticket_id, clock, table = reservation.ticket.id, pair.clock, pair.table

    def reaped() -> list[ReapKind]:
        actions = table.reap(clock())
        assert all(
            action == ReapAction(kind=action.kind, ticket_id=ticket_id) for action in actions
        )
        return [action.kind for action in actions]

    clock.advance(LEASE_S - 1)
    assert reaped() == []
    table.renew(ticket_id)
    clock.advance(LEASE_S - 1)
    assert reaped() == []
    clock.advance(1)
    assert reaped() == [ReapKind.REVOKE]
    assert reaped() == [ReapKind.REVOKE], "said until it is done"
    table.begin_revoke(ticket_id)
    assert reaped() == []
    clock.advance(2)
    assert reaped() == [ReapKind.QUARANTINE]
    table.quarantine(ticket_id)
    for _ in range(3):
        clock.advance(1)
        assert reaped() == [ReapKind.PROBE_WRITER]
        assert reaped() == []
    clock.advance(10_000)
    assert reaped() == [ReapKind.PROBE_WRITER]
    assert table.get(ticket_id).state is ReservationState.QUARANTINED


def test_reap_leaves_committed_reservations_alone(
    pair: PushPair, reservation: Reservation, receipts: list[Receipt]
) -> None:
    accept_all(reservation, receipts)
    pair.table.commit(reservation.ticket.id)
    pair.table.renew(reservation.ticket.id)
    pair.clock.advance(1e6)
    assert pair.table.reap(pair.clock()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda table, ticket_id: table.get(ticket_id),
        lambda table, ticket_id: table.renew(ticket_id),
        lambda table, ticket_id: table.commit(ticket_id),
        lambda table, ticket_id: table.begin_revoke(ticket_id),
        lambda table, ticket_id: table.quarantine(ticket_id),
    ],
)
def test_table_unknown_ticket_is_stale(
    pair: PushPair, call: Callable[[object, bytes], object]
) -> None:
    with pytest.raises(StaleTicketError):
        call(pair.table, bytes(16))


def test_reserve_ticket_of_another_issuer_or_with_foreign_blocks_is_refused(
    pair: PushPair,
) -> None:
    foreign = TicketIssuer("decode-0").issue(
        prefill_incarnation=PREFILL, block_ids=BLOCKS, rows=ROWS, lease_s=1.0
    )
    with pytest.raises(StaleTicketError):
        pair.table.reserve(foreign, peer=PEER)
    for block_ids in ((0, 1, 12), (0, 1), (0, 1, 1)):
        with pytest.raises(LayoutError):
            pair.reserve(block_ids, ROWS)
    assert len(pair.table) == 0


def test_table_region_larger_than_the_memory_is_refused(pair: PushPair) -> None:
    with pytest.raises(LayoutError, match="size_bytes"):
        pair.make_table(pair.target.buffer[:-1])
