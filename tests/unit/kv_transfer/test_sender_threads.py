"""The push pipeline with threads of its own and real time."""

import threading
import time

import pytest

from kv_transfer.errors import LeaseExpiredError
from kv_transfer.push_job import PushFailure, PushJob
from kv_transfer.sender import PushPipeline
from kv_transfer.spans import RowRange
from tests.support.kv_pools import make_region
from tests.support.processes import wait_until
from tests.support.push_pair import PREFILL, FakeEvent, PushLog, PushPair

ROWS = RowRange(0, 12)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> int:
    return request.param


def threaded(pair: PushPair, num_threads: int) -> PushPipeline:
    """Replace the pair's hand-stepped pipeline by one on real time."""
    return PushPipeline(
        link=pair.link,
        source=pair.source.region,
        target=make_region(pair.layout, num_blocks=12),
        layout=pair.layout,
        num_threads=num_threads,
    )


def test_threads_push_several_tickets_and_end_when_closed(num_threads: int) -> None:
    pair = PushPair()
    before = threading.active_count()
    pipeline = threaded(pair, num_threads)
    assert threading.active_count() == before + num_threads
    done = [threading.Event() for _ in range(4)]
    logs = [PushLog() for _ in range(4)]
    for number, log in enumerate(logs):
        source_blocks = tuple(range(number * 3, number * 3 + 3))
        target_blocks = tuple(reversed(source_blocks))
        pair.source.view.fill(str(number), source_blocks, 12)
        job = PushJob(
            ticket=pair.reserve(target_blocks, ROWS).ticket,
            source_block_ids=source_blocks,
            on_receipt=log.receipts.append,
            on_failure=log.failures.append,
            on_done=done[number].set,
        )
        pipeline.open(job)
        for start in range(0, 12, 3):
            for layer in range(2):
                rows = RowRange(start, start + 3)
                pipeline.submit(job, layer=layer, rows=rows, chunk=start, event=FakeEvent())
        pipeline.finish(job.ticket.id)
    assert all(event.wait(10) for event in done)
    for number, log in enumerate(logs):
        assert not log.failures
        target_blocks = tuple(reversed(range(number * 3, number * 3 + 3)))
        assert pair.view.holds(str(number), target_blocks, range(12))
        reservation = pair.table.get(log.receipts[0].ticket_id)
        for receipt in log.receipts:
            reservation.accept(receipt)
        assert reservation.is_complete
    assert pipeline.close(5.0)
    assert threading.active_count() == before


def test_threads_event_completing_later_is_noticed(num_threads: int) -> None:
    pair = PushPair()
    pipeline = threaded(pair, num_threads)
    log = PushLog()
    job = log.job(pair.reserve((0, 1, 2), ROWS).ticket, (0, 1, 2))
    pipeline.open(job)
    event = FakeEvent(is_complete=False)
    pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=event)
    wait_until(lambda: pipeline.stats().num_queued == 1, timeout_s=5, what="queued")
    event.complete()
    wait_until(lambda: len(log.receipts) == 3, timeout_s=5, what="three receipts")
    assert pipeline.close(5.0)


def test_threads_idle_ticket_expires_by_itself(num_threads: int) -> None:
    pair = PushPair()
    pipeline = threaded(pair, num_threads)
    failures: list[PushFailure] = []
    expired = threading.Event()

    def on_failure(failure: PushFailure) -> None:
        failures.append(failure)
        expired.set()

    ticket = pair.issuer.issue(
        prefill_incarnation=PREFILL, block_ids=(0, 1, 2), rows=ROWS, lease_s=0.25
    )
    job = PushJob(
        ticket=ticket,
        source_block_ids=(0, 1, 2),
        on_receipt=lambda receipt: None,
        on_failure=on_failure,
    )
    started_s = time.monotonic()
    pipeline.open(job)
    assert expired.wait(5)
    assert 0.2 <= time.monotonic() - started_s < 1.0
    assert isinstance(failures[0].cause, LeaseExpiredError)
    assert pipeline.close(5.0)


def test_threads_revoke_from_another_thread_while_a_write_hangs(num_threads: int) -> None:
    pair = PushPair()
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hang(copies: object) -> None:
        is_writing.set()
        assert may_go_on.wait(10)

    pair.link.before_write = hang
    pipeline = threaded(pair, num_threads)
    log = PushLog()
    job = log.job(pair.reserve((0, 1, 2), ROWS).ticket, (0, 1, 2))
    pair.source.view.fill("a", (0, 1, 2), 12)
    pipeline.open(job)
    pipeline.submit(job, layer=0, rows=ROWS, chunk=0, event=FakeEvent())
    assert is_writing.wait(5)
    quiet = pipeline.revoke(job.ticket.id)
    assert not quiet.done()
    assert not pipeline.close(0.01), "the hanging write is reported"
    may_go_on.set()
    quiet.result(5)
    assert pipeline.close(5.0)
    assert not any(pair.target.buffer)
    assert (log.receipts, log.failures) == ([], [])
