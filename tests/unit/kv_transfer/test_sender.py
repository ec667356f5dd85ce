"""The push pipeline, stepped by hand on a fake clock."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.errors import (
    EventTimeoutError,
    LayoutError,
    LeaseExpiredError,
    PeerDeadError,
    PushClosedError,
    PushCrashedError,
    PushQueueFullError,
    PushRefusedError,
    WriteFaultError,
)
from kv_transfer.push_board import PushLimits
from kv_transfer.push_job import PushJob
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt
from tests.support.push_pair import LEASE_S, FakeEvent, PushLog, PushPair

ROWS = RowRange(1, 11)
SOURCE_BLOCKS = (7, 2, 5)
TARGET_BLOCKS = (3, 4, 0)


@pytest.fixture
def pair() -> PushPair:
    made = PushPair()
    made.source.view.fill("a", SOURCE_BLOCKS, 12)
    return made


@pytest.fixture
def log() -> PushLog:
    return PushLog()


def open_job(pair: PushPair, log: PushLog, rows: RowRange = ROWS) -> PushJob:
    job = log.job(pair.reserve(TARGET_BLOCKS, rows).ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    return job


@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (2, 4), (4, 2), (3, 5)])
def test_push_all_rows_land_where_the_other_side_looks_for_them(
    source_size: int, target_size: int, log: PushLog
) -> None:
    pair = PushPair(source_block_size=source_size, target_block_size=target_size)
    source_blocks = tuple(reversed(range(-(-12 // source_size))))
    target_blocks = (11, *range(-(-12 // target_size) - 1))
    pair.source.view.fill("a", source_blocks, 12)
    job = log.job(pair.reserve(target_blocks, ROWS).ticket, source_blocks)
    pair.pipeline.open(job)
    pair.submit_layers(job, RowRange(1, 6), chunk=0)
    pair.submit_layers(job, RowRange(6, 11), chunk=1)
    pair.pipeline.finish(job.ticket.id)
    pair.pump()
    assert pair.view.holds("a", target_blocks, range(1, 11))
    for row in (0, *([11] if target_size == 4 else [])):
        assert not any(any(pair.view.row(*key, target_blocks, row)) for key in pair.view.places())
    assert log.num_done == 1
    assert not log.failures


def test_push_reports_one_receipt_per_component_in_layout_order(
    pair: PushPair, log: PushLog
) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS, chunk=3)
    pair.pump()
    assert [(r.layer, r.component) for r in log.receipts] == pair.view.places()
    first = log.receipts[0]
    assert (first.rank, first.chunk, first.rows, first.size_bytes) == (0, 3, ROWS, 240)
    assert (first.ticket_id, first.ticket_mac) == (job.ticket.id, job.ticket.mac)


def test_push_waits_for_the_event_of_the_rows(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    event = FakeEvent(is_complete=False)
    pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=event)
    assert pair.pump() == 0
    assert not any(pair.target.buffer)
    event.complete()
    pair.pump()
    assert len(log.receipts) == 3


def test_push_items_of_one_ticket_keep_their_order_behind_an_open_event(
    pair: PushPair, log: PushLog
) -> None:
    job = open_job(pair, log)
    event = FakeEvent(is_complete=False)
    pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=event)
    pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=0, event=FakeEvent())
    assert pair.pump() == 0
    event.complete()
    pair.pump()
    assert [receipt.layer for receipt in log.receipts] == [0, 0, 0, 1, 1]


def test_push_another_ticket_goes_first_while_an_event_is_open(
    pair: PushPair, log: PushLog
) -> None:
    waiting = open_job(pair, log)
    pair.pipeline.submit(waiting, layer=0, rows=ROWS, chunk=0, event=FakeEvent(is_complete=False))
    other = PushLog()
    job = other.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    pair.pump()
    assert len(other.receipts) == 5
    assert not log.receipts


def test_push_tickets_take_turns(pair: PushPair) -> None:
    order: list[str] = []
    for name, blocks in (("long", (0, 1, 2)), ("short", (3, 4, 5))):
        job = PushLog().job(pair.reserve(blocks, ROWS).ticket, SOURCE_BLOCKS)
        job = _with_receipts(job, lambda receipt, name=name: order.append(name))
        pair.pipeline.open(job)
        for start in (1, 4, 7) if name == "long" else (1,):
            pair.pipeline.submit(
                job, layer=0, rows=RowRange(start, start + 3), chunk=0, event=FakeEvent()
            )
    pair.pump()
    assert order == ["long"] * 3 + ["short"] * 3 + ["long"] * 6


def _with_receipts(job: PushJob, on_receipt: Callable[[Receipt], None]) -> PushJob:
    return replace(job, on_receipt=on_receipt)


def test_finish_before_the_writes_reports_done_after_them(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    assert pair.pipeline.finish(job.ticket.id)
    assert log.num_done == 0
    pair.pump()
    assert (log.num_done, len(log.receipts)) == (1, 5)
    assert not pair.pipeline.finish(job.ticket.id)
    assert not pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=FakeEvent())


def test_finish_after_the_writes_reports_done_at_once(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    pair.pump()
    assert log.num_done == 0
    pair.pipeline.finish(job.ticket.id)
    assert log.num_done == 1


def test_revoke_between_writes_is_quiet_at_once_and_for_ever(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    pair.pipeline.run_once()
    before = bytes(pair.target.buffer)
    assert pair.pipeline.revoke(job.ticket.id).done()
    assert pair.pump() == 0
    assert not pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=9, event=FakeEvent())
    assert bytes(pair.target.buffer) == before
    assert (len(log.receipts), log.failures, log.num_done) == (3, [], 0)


def test_revoke_twice_and_of_an_ended_ticket_is_quiet(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    assert pair.pipeline.revoke(job.ticket.id).done()
    assert pair.pipeline.revoke(job.ticket.id).done()


def test_revoke_during_a_write_is_quiet_only_after_it(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    futures = []

    def revoke(_: object) -> None:
        futures.append(pair.pipeline.revoke(job.ticket.id))
        futures.append(pair.pipeline.revoke(job.ticket.id))
        assert not futures[0].done()

    pair.link.before_write = revoke
    pair.pipeline.run_once()
    assert all(future.done() for future in futures)
    assert not any(pair.target.buffer), "the check before the first piece saw the revoke"
    assert (log.receipts, log.failures) == ([], [])
    pair.link.before_write = lambda copies: None
    assert pair.pump() == 0


def test_revoke_cancelled_waiter_does_not_break_the_report(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    futures = []

    def revoke(_: object) -> None:
        futures.append(pair.pipeline.revoke(job.ticket.id))
        assert not futures[0].cancel()

    pair.link.before_write = revoke
    pair.pipeline.run_once()
    assert futures[0].result(0) is None


def test_revoke_before_the_grant_refuses_the_ticket_when_it_comes(
    pair: PushPair, log: PushLog
) -> None:
    job = log.job(pair.reserve(TARGET_BLOCKS, ROWS).ticket, SOURCE_BLOCKS)
    assert pair.pipeline.revoke(job.ticket.id).done()
    with pytest.raises(PushRefusedError, match=r"ticket\.id"):
        pair.pipeline.open(job)


def test_open_ticket_that_ended_is_refused(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    with pytest.raises(PushRefusedError):
        pair.pipeline.open(job)
    pair.pipeline.finish(job.ticket.id)
    assert log.num_done == 1
    with pytest.raises(PushRefusedError):
        pair.pipeline.open(job)


def test_buried_ids_are_forgotten_after_their_time_only(log: PushLog) -> None:
    pair = PushPair(limits=PushLimits(buried_s=60, max_buried=2))
    for number in (1, 2):
        pair.pipeline.revoke(bytes([number]) * 16)
    with pytest.raises(PushQueueFullError):
        pair.pipeline.revoke(bytes([3]) * 16)
    pair.pipeline.revoke(bytes([2]) * 16)
    with pytest.raises(PushQueueFullError):
        open_job(pair, log)
    pair.clock.advance(61)
    pair.pipeline.revoke(bytes([3]) * 16)


def test_lease_not_renewed_stops_an_idle_ticket_at_80_percent(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.clock.advance(LEASE_S * 0.79)
    assert pair.pump() == 0
    pair.clock.advance(LEASE_S * 0.011)
    assert pair.pump() == 1
    assert [type(failure.cause) for failure in log.failures] == [LeaseExpiredError]
    assert log.failures[0].layer is None
    assert not pair.pipeline.renew(job.ticket.id)
    assert not pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=FakeEvent())


def test_lease_ended_names_the_layer_that_waited(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=0, event=FakeEvent(is_complete=False))
    pair.clock.advance(LEASE_S * 0.8)
    pair.pump()
    assert [failure.layer for failure in log.failures] == [1]


def test_lease_renewed_counts_again(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    for _ in range(5):
        pair.clock.advance(LEASE_S * 0.7)
        assert pair.pump() == 0
        assert pair.pipeline.renew(job.ticket.id)
    pair.clock.advance(LEASE_S * 0.8)
    assert not pair.pipeline.renew(job.ticket.id), "a late renewal revives nothing"
    pair.pump()
    assert len(log.failures) == 1


def test_lease_ending_during_a_write_stops_it(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    pair.link.before_check = lambda: pair.clock.advance(LEASE_S * 0.8)
    pair.pipeline.run_once()
    assert not any(pair.target.buffer)
    assert [type(failure.cause) for failure in log.failures] == [LeaseExpiredError]
    assert log.failures[0].layer == 0
    assert pair.pump() == 0


def test_lease_ending_after_the_last_check_of_a_write_ends_the_ticket_next(
    pair: PushPair, log: PushLog
) -> None:
    job = open_job(pair, log)
    pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=0, event=FakeEvent())
    other = PushLog()
    pair.pipeline.open(other.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS))

    def let_the_other_expire_while_this_is_written(receipt: Receipt) -> None:
        if receipt.component == "rope":
            pair.clock.advance(LEASE_S * 0.8)
            pair.pipeline._board.expired(pair.clock())

    pair.pipeline._board.get(job.ticket.id).job = _with_receipts(
        job, let_the_other_expire_while_this_is_written
    )
    pair.pump()
    assert len(log.failures) == 1
    assert len(other.failures) == 1


def test_write_fault_is_reported_once_with_its_layer_and_ends_the_ticket(
    pair: PushPair, log: PushLog
) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    fault = WriteFaultError("planned")
    num_writes: list[object] = []

    def fail_the_fourth(copies: object) -> None:
        num_writes.append(copies)
        if len(num_writes) == 4:
            raise fault

    pair.link.before_write = fail_the_fourth
    pair.pipeline.finish(job.ticket.id)
    pair.pump()
    assert len(log.receipts) == 3
    assert [(failure.layer, failure.rank) for failure in log.failures] == [(1, 0)]
    assert log.failures[0].cause is fault
    assert (len(num_writes), log.num_done) == (4, 0)
    assert pair.pipeline.revoke(job.ticket.id).done()


def test_write_to_a_dead_peer_fails_every_open_ticket(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    idle = PushLog()
    pair.pipeline.open(idle.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS))
    pair.submit_layers(job, ROWS)
    pair.target.close()
    pair.pump()
    for reports in (log, idle):
        assert [type(failure.cause) for failure in reports.failures] == [PeerDeadError]
    assert pair.pipeline.stats().num_open == 0


def test_event_not_complete_in_time_fails_the_ticket(log: PushLog) -> None:
    pair = PushPair(limits=PushLimits(event_timeout_s=3.0))
    job = open_job(pair, log)
    pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=0, event=FakeEvent(is_complete=False))
    pair.clock.advance(2.9)
    assert pair.pump() == 0
    pair.clock.advance(0.2)
    pair.pump()
    assert [type(failure.cause) for failure in log.failures] == [EventTimeoutError]
    assert log.failures[0].layer == 1
    assert not any(pair.target.buffer)


def test_event_that_fails_fails_the_ticket_only(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    event = FakeEvent()
    event.error = RuntimeError("device lost")
    pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=event)
    pair.pump()
    assert isinstance(log.failures[0].cause, PushCrashedError)
    assert log.failures[0].cause.__cause__ is event.error
    open_job_again = PushLog()
    job = open_job_again.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    pair.pump()
    assert len(open_job_again.receipts) == 5


def test_callback_that_raises_fails_its_ticket_and_not_the_pipeline(
    pair: PushPair, log: PushLog
) -> None:
    def refuse(receipt: Receipt) -> None:
        raise RuntimeError("the loop is closed")

    job = _with_receipts(log.job(pair.reserve(TARGET_BLOCKS, ROWS).ticket, SOURCE_BLOCKS), refuse)
    pair.pipeline.open(job)
    pair.submit_layers(job, ROWS)
    assert pair.pump() == 1
    assert isinstance(log.failures[0].cause, PushCrashedError)


@pytest.mark.parametrize(
    ("layer", "rows", "field"),
    [
        (2, ROWS, "layer"),
        (-1, ROWS, "layer"),
        (0, RowRange(0, 4), "rows"),
        (0, RowRange(9, 12), "rows"),
        (0, RowRange(1, 3), r"rows\.start"),
    ],
)
def test_submit_what_is_not_granted_or_was_submitted_is_refused(
    pair: PushPair, log: PushLog, layer: int, rows: RowRange, field: str
) -> None:
    job = open_job(pair, log)
    pair.pipeline.submit(job, layer=0, rows=RowRange(1, 4), chunk=0, event=FakeEvent())
    with pytest.raises(PushRefusedError, match=field):
        pair.pipeline.submit(job, layer=layer, rows=rows, chunk=1, event=FakeEvent())


def test_submit_after_finish_is_refused_while_writes_are_left(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=FakeEvent())
    pair.pipeline.finish(job.ticket.id)
    with pytest.raises(PushRefusedError, match="finished"):
        pair.pipeline.submit(job, layer=1, rows=ROWS, chunk=0, event=FakeEvent())


def test_submit_beyond_the_queue_bound_raises_instead_of_waiting(log: PushLog) -> None:
    pair = PushPair(limits=PushLimits(max_queued_chunks=2))
    job = open_job(pair, log)
    for row in range(1, 5):
        pair.pipeline.submit(
            job, layer=0, rows=RowRange(row, row + 1), chunk=row, event=FakeEvent()
        )
    with pytest.raises(PushQueueFullError):
        pair.pipeline.submit(job, layer=0, rows=RowRange(5, 6), chunk=5, event=FakeEvent())
    assert pair.pipeline.stats().num_queued == 4


def test_open_beyond_the_bound_is_refused(log: PushLog) -> None:
    pair = PushPair(limits=PushLimits(max_jobs=1))
    open_job(pair, log)
    with pytest.raises(PushQueueFullError):
        pair.pipeline.open(log.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS))


@pytest.mark.parametrize("source_blocks", [(7, 2), (7, 2, 12), (7, 2, 2)])
def test_open_source_blocks_that_do_not_fit_are_refused(
    pair: PushPair, log: PushLog, source_blocks: tuple[int, ...]
) -> None:
    ticket = pair.reserve(TARGET_BLOCKS, ROWS).ticket
    with pytest.raises(LayoutError):
        pair.pipeline.open(log.job(ticket, source_blocks))


@pytest.mark.parametrize("target_blocks", [(3, 4), (3, 4, 12), (3, 4, 4)])
def test_open_target_blocks_that_do_not_fit_are_refused(
    pair: PushPair, log: PushLog, target_blocks: tuple[int, ...]
) -> None:
    ticket = pair.issuer.issue(
        prefill_incarnation="p", block_ids=target_blocks, rows=ROWS, lease_s=1.0
    )
    with pytest.raises(LayoutError):
        pair.pipeline.open(log.job(ticket, SOURCE_BLOCKS))


def test_stats_count_bytes_and_seconds_of_writes(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.link.before_check = lambda: pair.clock.advance(0.25)
    pair.submit_layers(job, ROWS)
    pair.pump()
    stats = pair.pipeline.stats()
    assert stats.num_bytes == sum(receipt.size_bytes for receipt in log.receipts) == 740
    assert stats.write_s == pytest.approx(5 * 0.25)
    assert (stats.num_open, stats.num_queued) == (1, 0)


def test_close_revokes_everything_and_takes_nothing_more(pair: PushPair, log: PushLog) -> None:
    job = open_job(pair, log)
    pair.submit_layers(job, ROWS)
    assert pair.pipeline.close(1.0)
    assert pair.pipeline.close(1.0)
    assert pair.pump() == 0
    assert not any(pair.target.buffer)
    with pytest.raises(PushClosedError):
        pair.pipeline.open(log.job(pair.reserve((8, 9, 10), ROWS).ticket, SOURCE_BLOCKS))
