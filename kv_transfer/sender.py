"""Pushes the KV of computed rows into the memory of one decode service, layer by layer.

    open ──submit*, finish──▶ all written ──▶ done
      │
      ├──revoke──▶ quiet                 no byte is written any more, and nothing else is reported
      └──fault, or lease not renewed──▶ failed

The compute thread only ever queues; it never waits for a peer. Push threads wait for the events
of the queued rows, do the writes that the plan makes of them and report a receipt for each. Tickets
take turns, so a long prompt does not hold up a short one. A decode service has a pipeline of its
own: one that is slow or stopped holds up nobody else.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kv_transfer.engine.base import WriterLink
from kv_transfer.errors import (
    KvTransferError,
    LeaseExpiredError,
    PeerDeadError,
    PushClosedError,
    PushCrashedError,
    WriteStoppedError,
)
from kv_transfer.layout import KvLayout, RegionMap, StagingMap
from kv_transfer.push_board import PushBoard, PushLimits
from kv_transfer.push_job import OpenJob, PushEvent, PushFailure, PushItem, PushJob
from kv_transfer.push_plan import DirectPlan, PushPlan, StagedPlan
from kv_transfer.spans import RowRange, check_block_ids, check_blocks_cover
from kv_transfer.ticket import Receipt

__all__ = [
    "PushEvent",
    "PushFailure",
    "PushJob",
    "PushLimits",
    "PushPipeline",
    "PushStats",
]

logger = logging.getLogger(__name__)

# While the oldest event is waited for, a later item that is ready waits at most this long.
_EVENT_WAIT_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """Totals of one pipeline since its start.

    Attributes:
        num_bytes: Bytes of complete writes.
        write_s: Time spent in complete writes, summed over threads.
        num_open: Tickets open now.
        num_queued: Items waiting now.
    """

    num_bytes: int
    write_s: float
    num_open: int
    num_queued: int


class PushPipeline:
    """Writes under tickets of one decode service. All methods are thread-safe."""

    def __init__(
        self,
        *,
        link: WriterLink,
        source: RegionMap,
        target: RegionMap | StagingMap,
        layout: KvLayout,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int = 1,
        target_block_size: int | None = None,
        limits: PushLimits | None = None,
    ) -> None:
        """Check both regions and start the push threads.

        Args:
            link: Reaches the target; stays its owner's, who closes it after the pipeline.
            source: Own pool, in absolute addresses.
            target: The peer's pool, or its staging ring, in offsets.
            layout: Own layout; the peer's is equal apart from its block size.
            rank: Own rank, for receipts.
            clock: Monotonic seconds.
            num_threads: Push threads; with 0 the owner calls `run_once`.
            target_block_size: Rows per block of the peer; None if equal to the own.
            limits: Bounds; None takes the defaults.

        Raises:
            LayoutError: A region does not fit the layout.
        """
        self._link = link
        self._rank = rank
        self._clock = clock
        self._limits = limits if limits is not None else PushLimits()
        self._source_block_size = layout.block_size
        self._target_block_size = target_block_size or layout.block_size
        self._num_source_blocks = source.num_blocks
        self._num_target_blocks = target.num_blocks
        self._plan = _plan(source, target, layout, self._target_block_size)
        self._board = PushBoard(
            num_layers=len(layout.layers),
            limits=self._limits,
            max_rows=self._plan.max_rows,
            uses_slots=self._plan.uses_slots,
        )
        self._changed = threading.Condition()  # guards everything below and the board
        self._is_closed = False
        self._num_bytes = 0
        self._write_s = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-push-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, job: PushJob) -> None:
        """Take a ticket; its lease counts from now.

        Raises:
            LayoutError: Its blocks are not in the pools or do not cover the granted rows.
            PushRefusedError: A ticket of this id was opened or revoked before.
            PushQueueFullError: Too many tickets are open or remembered.
            PushClosedError: The pipeline is closed.
        """
        rows = job.ticket.rows
        check_block_ids("ticket.block_ids", job.ticket.block_ids, self._num_target_blocks)
        check_block_ids("source_block_ids", job.source_block_ids, self._num_source_blocks)
        check_blocks_cover(job.ticket.block_ids, self._target_block_size, rows)
        check_blocks_cover(job.source_block_ids, self._source_block_size, rows)
        self._plan.check_slots(job.ticket.slots)
        with self._changed:
            self._check_not_closed()
            self._board.open(job, self._clock())
            self._changed.notify_all()

    def submit(
        self, job: PushJob, *, layer: int, rows: RowRange, chunk: int, event: PushEvent
    ) -> bool:
        """Queue the rows of one layer; never waits.

        Returns:
            False when the job is not open (any more): nothing will be written.

        Raises:
            PushRefusedError: The layer or rows are not granted, or not in ascending order.
            PushQueueFullError: A bound is reached. The owner must revoke the job.
        """
        with self._changed:
            entry = self._board.get(job.ticket.id)
            if entry is None or entry.is_revoked:
                return False
            now_s = self._clock()
            self._board.submit(entry, layer=layer, rows=rows, chunk=chunk, event=event, now_s=now_s)
            self._changed.notify()
            return True

    def finish(self, ticket_id: bytes) -> bool:
        """Say that all items were submitted; `on_done` follows when all are written.

        Returns:
            False when the ticket is not open.
        """
        with self._changed:
            entry = self._board.get(ticket_id)
            if entry is None or entry.is_revoked:
                return False
            entry.is_finished = True
            is_done = entry.is_done
            if is_done:
                self._board.close(entry, self._clock())
        if is_done:
            self._call(entry.job.on_done)
        return True

    def renew(self, ticket_id: bytes) -> bool:
        """Let the lease count again from now.

        Returns:
            False when the ticket is not open or its time is over: it is not revived.
        """
        with self._changed:
            entry = self._board.get(ticket_id)
            now_s = self._clock()
            if entry is None or entry.is_revoked or now_s >= entry.stop_at_s:
                return False
            entry.renew(now_s)
            return True

    def free_slots(self, ticket_id: bytes, slots: Sequence[int]) -> bool:
        """Let slots of a ticket be written again, because decode has taken what they held.

        Returns:
            False when the ticket is not open.

        Raises:
            PushRefusedError: A slot is not the ticket's, or was not written. The owner must revoke
                the job.
        """
        with self._changed:
            entry = self._board.get(ticket_id)
            if entry is None or entry.is_revoked:
                return False
            self._board.free_slots(entry, slots)
            self._changed.notify()
            return True

    def revoke(self, ticket_id: bytes) -> "Future[None]":
        """End a ticket: at most 1 MiB more is written, and no receipt or failure is reported.

        Idempotent. An unknown id is remembered, so that its ticket is refused should it come.

        Returns:
            A future that is done when no byte of the ticket can be written any more, ever.

        Raises:
            PushQueueFullError: The id is unknown and cannot be remembered.
        """
        with self._changed:
            entry = self._board.get(ticket_id)
            if entry is None:
                self._board.bury_unknown(ticket_id, self._clock())
                future: Future[None] = Future()
                future.set_result(None)
                return future
            is_quiet = self._begin_revoke(entry)
        if is_quiet:
            entry.quiet.set_result(None)
        return entry.quiet

    def stats(self) -> PushStats:
        """Return the totals."""
        with self._changed:
            return PushStats(
                num_bytes=self._num_bytes,
                write_s=self._write_s,
                num_open=self._board.num_open,
                num_queued=self._board.num_queued,
            )

    def close(self, timeout_s: float) -> bool:
        """Revoke every ticket and end the threads. Idempotent.

        Returns:
            Whether all threads ended in time. If not, a write still hangs in the engine.
        """
        with self._changed:
            self._is_closed = True
            quiet = [entry for entry in self._board.all_open() if self._begin_revoke(entry)]
            self._changed.notify_all()
        for entry in quiet:
            entry.quiet.set_result(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def run_once(self) -> bool:
        """Do one piece of work on the calling thread: end leases, write one ready item.

        Returns:
            Whether there was anything to do.
        """
        with self._changed:
            now_s = self._clock()
            expired = [(entry, _next_layer(entry)) for entry in self._board.expired(now_s)]
            for entry, _ in expired:
                self._board.close(entry, now_s)
            taken = self._board.take(now_s)
        for entry, layer in expired:
            self._report(entry, layer, _lease_expired(entry))
        if taken is not None:
            self._write(*taken)
        return bool(expired) or taken is not None

    def _run(self) -> None:
        while not self._is_closed:
            if not self.run_once():
                self._wait_for_work()

    def _wait_for_work(self) -> None:
        """Wait until an item is queued or its event completes, a lease may end, or the close."""
        with self._changed:
            if self._is_closed:
                return
            item = self._board.oldest_waiting()
            if item is None:
                wait_s = self._board.next_stop_s - self._clock()
                self._changed.wait(None if wait_s == float("inf") else max(0.0, wait_s))
                return
        item.poll(_EVENT_WAIT_S)

    def _write(self, entry: OpenJob, item: PushItem) -> None:
        """Write a taken item and settle its ticket; raises nothing."""
        error: KvTransferError | None = None
        try:
            self._write_components(entry, item)
        except WriteStoppedError as stopped:
            is_expired = self._clock() >= entry.stop_at_s
            error = _lease_expired(entry) if is_expired else stopped
        except KvTransferError as fault:
            error = fault
        except Exception as fault:  # whatever it is, it ends this ticket and not the thread
            logger.exception("ticket_id=%s push crashed", entry.ticket_id.hex())
            error = PushCrashedError(f"{type(fault).__name__}: {fault}")
            error.__cause__ = fault
        self._settle(entry, item.layer, error)

    def _write_components(self, entry: OpenJob, item: PushItem) -> None:
        if item.error is not None:
            raise item.error
        job = entry.job
        should_stop = partial(_must_stop, entry, self._clock)
        for write in self._plan.writes(job, item):
            started_s = self._clock()
            digest = self._link.write(write.copies, should_stop)
            with self._changed:
                self._num_bytes += write.num_bytes
                self._write_s += self._clock() - started_s
            if entry.is_revoked:
                return
            job.on_receipt(
                Receipt(
                    ticket_id=job.ticket.id,
                    ticket_mac=job.ticket.mac,
                    layer=item.layer,
                    component=write.component,
                    rank=self._rank,
                    chunk=item.chunk,
                    rows=item.rows,
                    size_bytes=write.num_bytes,
                    digest=digest,
                    slot=item.slot,
                )
            )

    def _settle(self, entry: OpenJob, layer: int, error: KvTransferError | None) -> None:
        """Decide, once, how the ticket goes on after a write has ended."""
        orphans: list[OpenJob] = []
        with self._changed:
            self._board.put_back(entry)
            is_revoked = entry.is_revoked
            is_over = is_revoked or error is not None or entry.is_done
            if is_over:
                self._board.close(entry, self._clock())
            if isinstance(error, PeerDeadError):
                orphans = [other for other in self._board.all_open() if not other.is_writing]
                for other in orphans:
                    self._board.close(other, self._clock())
        if is_revoked:
            entry.quiet.set_result(None)
        elif error is not None:
            self._report(entry, layer, error)
        elif is_over:
            self._call(entry.job.on_done)
        for other in orphans:
            assert error is not None  # only a dead peer makes orphans
            self._report(other, None, error)

    def _begin_revoke(self, entry: OpenJob) -> bool:
        """Mark a ticket; returns whether it is quiet at once, so that `quiet` is due."""
        entry.is_revoked = True
        if entry.is_writing:
            return False
        self._board.close(entry, self._clock())
        return True

    def _report(self, entry: OpenJob, layer: int | None, cause: KvTransferError) -> None:
        failure = PushFailure(layer=layer, rank=self._rank, cause=cause)
        self._call(partial(entry.job.on_failure, failure))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # the last word on a ticket: nobody is left to be told
            logger.exception("the callback of an ended push raised")

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise PushClosedError("the push pipeline is closed")


def _must_stop(entry: OpenJob, clock: Callable[[], float]) -> bool:
    return entry.is_revoked or clock() >= entry.stop_at_s


def _next_layer(entry: OpenJob) -> int | None:
    return entry.items[0].layer if entry.items else None


def _lease_expired(entry: OpenJob) -> LeaseExpiredError:
    return LeaseExpiredError(
        f"the lease of {entry.job.ticket.lease_s} s was not renewed by 80 % of its time"
    )


def _plan(
    source: RegionMap,
    target: RegionMap | StagingMap,
    layout: KvLayout,
    target_block_size: int,
) -> PushPlan:
    """Choose how rows are placed: the target says it."""
    if isinstance(target, StagingMap):
        return StagedPlan(source, target, layout)
    return DirectPlan(source, target, layout, target_block_size)
