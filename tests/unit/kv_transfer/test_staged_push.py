"""The push pipeline into a ring: whose slot is free, who waits, and what a peer may free."""

from __future__ import annotations

import threading
import time

import pytest

from kv_transfer.errors import LayoutError, LeaseExpiredError, PushRefusedError
from kv_transfer.push_job import PushJob
from kv_transfer.spans import RowRange
from tests.support.processes import wait_until
from tests.support.push_pair import LEASE_S, FakeEvent, PushLog
from tests.support.staged_pair import StagedPair

ROWS = RowRange(0, 10)
BLOCKS, SOURCE_BLOCKS = (5, 1, 8), (2, 0, 7)


@pytest.fixture
def pair() -> StagedPair:
    """Slots of two rows, so that ten rows of two layers are ten items."""
    pair = StagedPair(rows_per_slot=2)
    pair.source.view.fill("a", SOURCE_BLOCKS, ROWS.end)
    return pair


@pytest.fixture
def log() -> PushLog:
    return PushLog()


def open_job(pair: StagedPair, log: PushLog, slots: tuple[int, ...]) -> PushJob:
    """A ticket with all its rows submitted."""
    job = log.job(pair.reserve(BLOCKS, ROWS, slots).ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    return job


def take_last_slot(pair: StagedPair, log: PushLog) -> int:
    """Land the last receipt and free its slot, as decode does."""
    receipt = log.receipts[-1]
    pair.table.get(receipt.ticket_id).accept(receipt)
    assert receipt.slot is not None
    assert pair.pipeline.free_slots(receipt.ticket_id, (receipt.slot,))
    return receipt.slot


def test_items_are_cut_to_slots_and_keep_their_order(pair: StagedPair, log: PushLog) -> None:
    open_job(pair, log, (0, 1, 2, 3))
    assert pair.pipeline.stats().num_queued == 10
    pair.pump()
    assert [(r.layer, r.rows.start, len(r.rows), r.slot) for r in log.receipts] == [
        (0, 0, 2, 0),
        (0, 2, 2, 1),
        (0, 4, 2, 2),
        (0, 6, 2, 3),
    ]


def test_one_slot_is_enough_for_a_whole_prompt(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (3,))
    pair.pipeline.finish(job.ticket.id)
    for number in range(1, 11):
        assert pair.pump() == 1
        assert len(log.receipts) == number
        assert log.num_done == (number == 10)
        if number < 10:
            assert take_last_slot(pair, log) == 3
        else:
            pair.table.get(job.ticket.id).accept(log.receipts[-1])
    assert pair.table.get(job.ticket.id).is_complete
    assert pair.view.holds("a", BLOCKS, range(ROWS.end))


def test_parked_item_is_written_as_soon_as_a_slot_is_free(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (0, 2))
    assert pair.pump() == 2
    assert not pair.pipeline.run_once(), "nothing to do without a slot"
    assert pair.pipeline.free_slots(job.ticket.id, (2,))
    assert pair.pump() == 1
    assert [receipt.slot for receipt in log.receipts] == [0, 2, 2]


def test_slots_that_a_hostile_peer_frees_are_refused(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (0, 2))
    with pytest.raises(PushRefusedError, match="was written"):
        pair.pipeline.free_slots(job.ticket.id, (0,))
    pair.pump()
    for strange in (1, 4, 2**32 - 1):
        with pytest.raises(PushRefusedError, match="of the ticket"):
            pair.pipeline.free_slots(job.ticket.id, (strange,))
    pair.pipeline.free_slots(job.ticket.id, (0,))
    with pytest.raises(PushRefusedError, match="was written"):
        pair.pipeline.free_slots(job.ticket.id, (0,))
    assert pair.pump() == 1


def test_slot_of_another_ticket_cannot_be_freed(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (0,))
    other = log.job(pair.reserve((0, 2, 3), ROWS, (1,)).ticket, (1, 3, 4))
    pair.pipeline.open(other)
    pair.submit_layers(other, ROWS)
    pair.pump()
    with pytest.raises(PushRefusedError):
        pair.pipeline.free_slots(job.ticket.id, (1,))


def test_freeing_slots_of_an_ended_ticket_changes_nothing(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (0,))
    pair.pump()
    pair.pipeline.revoke(job.ticket.id).result(0)
    assert not pair.pipeline.free_slots(job.ticket.id, (0,))
    assert not pair.pipeline.free_slots(b"x" * 16, (0,))
    assert pair.pump() == 0


def test_revoke_while_parked_is_quiet_at_once(pair: StagedPair, log: PushLog) -> None:
    job = open_job(pair, log, (1,))
    pair.pump()
    assert pair.pipeline.revoke(job.ticket.id).done()
    assert len(log.receipts) == 1
    assert (pair.pipeline.stats().num_open, pair.pipeline.stats().num_queued) == (0, 0)


def test_lease_ends_while_parked(pair: StagedPair, log: PushLog) -> None:
    open_job(pair, log, (1,))
    pair.pump()
    pair.clock.advance(LEASE_S * 0.81)
    pair.pump()
    (failure,) = log.failures
    assert isinstance(failure.cause, LeaseExpiredError)
    assert failure.layer == 0


def test_parked_longer_than_an_event_may_take_is_no_fault(pair: StagedPair, log: PushLog) -> None:
    """The event of a parked item is complete; it is decode that is slow."""
    job = open_job(pair, log, (1,))
    pair.pump()
    for _ in range(10):
        pair.clock.advance(LEASE_S * 0.7)
        assert pair.pipeline.renew(job.ticket.id)
        pair.pump()
    take_last_slot(pair, log)
    assert pair.pump() == 1
    assert not log.failures


def test_parked_ticket_holds_up_no_other_and_turns_are_kept(pair: StagedPair) -> None:
    logs = [PushLog() for _ in range(3)]
    sources = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    order: list[int] = []
    jobs = []
    for number, (log, blocks) in enumerate(zip(logs, sources, strict=True)):
        slots = ((0,), (1,), (2, 3))[number]
        job = PushJob(
            ticket=pair.reserve(blocks, ROWS, slots).ticket,
            source_block_ids=blocks,
            on_receipt=lambda _, number=number: order.append(number),
            on_failure=log.failures.append,
        )
        jobs.append(job)
        pair.pipeline.open(job)
        pair.submit_layers(job, ROWS)
    pair.pump()
    assert order == [0, 1, 2, 2], "each slot is written once, and tickets take turns"
    for number, slot in ((0, 0), (1, 1), (2, 3), (2, 2)):
        pair.pipeline.free_slots(jobs[number].ticket.id, (slot,))
    pair.pump()
    assert order[4:] == [0, 1, 2, 2]


def test_slot_freed_while_its_ticket_is_being_written_is_used_next(
    pair: StagedPair, log: PushLog
) -> None:
    job = open_job(pair, log, (0, 1))
    pair.pipeline.run_once()

    def free(copies: object) -> None:
        pair.pipeline.free_slots(job.ticket.id, (0,))
        pair.link.before_write = lambda copies: None

    pair.link.before_write = free
    pair.pump()
    assert [receipt.slot for receipt in log.receipts] == [0, 1, 0]


@pytest.mark.parametrize("slots", [(), (4,), (0, 0)])
def test_open_with_slots_that_do_not_fit_the_ring_is_refused(
    pair: StagedPair, log: PushLog, slots: tuple[int, ...]
) -> None:
    job = log.job(pair.reserve(BLOCKS, ROWS, slots).ticket, SOURCE_BLOCKS)
    with pytest.raises(LayoutError) as caught:
        pair.pipeline.open(job)
    assert caught.value.field == "ticket.slots"
    assert pair.pipeline.stats().num_open == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_burn_no_time_on_a_parked_ticket_and_wake_for_a_slot(num_threads: int) -> None:
    pair = StagedPair(rows_per_slot=2)
    pair.source.view.fill("a", SOURCE_BLOCKS, ROWS.end)
    pipeline = pair.make_pipeline(num_threads=num_threads)
    arrived = threading.Semaphore(0)
    receipts = []

    def on_receipt(receipt: object) -> None:
        receipts.append(receipt)
        arrived.release()

    job = PushJob(
        ticket=pair.reserve(BLOCKS, ROWS, (1,)).ticket,
        source_block_ids=SOURCE_BLOCKS,
        on_receipt=on_receipt,
        on_failure=lambda failure: pytest.fail(str(failure)),
    )
    pipeline.open(job)
    pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=FakeEvent())
    assert arrived.acquire(timeout=5)
    wait_until(lambda: pipeline.stats().num_queued == 4, timeout_s=5, what="four are parked")
    before_s = time.process_time()
    assert not arrived.acquire(timeout=0.3), "no slot, no write"
    assert time.process_time() - before_s < 0.1
    for _ in range(4):
        assert pipeline.free_slots(job.ticket.id, (1,))
        assert arrived.acquire(timeout=5)
    assert [receipt.rows.start for receipt in receipts] == [0, 2, 4, 6, 8]
    assert pipeline.close(5.0)


def test_threads_several_tickets_share_a_ring_and_all_rows_land() -> None:
    pair = StagedPair(rows_per_slot=3, num_slots=4)
    pipeline = pair.make_pipeline(num_threads=2)
    done = [threading.Event() for _ in range(4)]
    lock = threading.Lock()
    for number in range(4):
        blocks = tuple(range(number * 3, number * 3 + 3))
        pair.source.view.fill(str(number), blocks, 12)
        reservation = pair.reserve(tuple(reversed(blocks)), RowRange(0, 12), (number,))

        def land(receipt: object, reservation: object = reservation) -> None:
            with lock:
                reservation.accept(receipt)
            pipeline.free_slots(receipt.ticket_id, (receipt.slot,))

        job = PushJob(
            ticket=reservation.ticket,
            source_block_ids=blocks,
            on_receipt=land,
            on_failure=lambda failure: pytest.fail(str(failure)),
            on_done=done[number].set,
        )
        pipeline.open(job)
        for layer in range(2):
            pipeline.submit(job, layer=layer, rows=RowRange(0, 12), chunk=0, event=FakeEvent())
        pipeline.finish(job.ticket.id)
    assert all(event.wait(10) for event in done)
    assert pipeline.close(5.0)
    for number, reservation in enumerate(pair.table.reservations()):
        assert reservation.is_complete
        target = tuple(reversed(range(number * 3, number * 3 + 3)))
        assert pair.view.holds(str(number), target, range(12))
