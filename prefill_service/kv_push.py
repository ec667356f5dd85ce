"""Joins the jobs, which live on the event loop, to kv_transfer's push threads.

Each decode session has a pipeline of its own, so a slow decode service holds up nobody else. What
push threads report is handed to the loop, in order; nothing here blocks the loop or the compute
thread.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from attention_core.backends.base import Event
from kv_transfer.engine.base import WriterLink
from kv_transfer.errors import KvTransferError, LeaseExpiredError
from kv_transfer.sender import PushFailure, PushJob, PushPipeline
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, Ticket

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed:
    """Why the push of a job ended; nothing is written under its ticket any more.

    Attributes:
        layer: Layer that failed or came next; None if no layer is concerned.
        rank: The rank that reports.
        is_lease_expired: Whether decode stopped renewing.
        message: The cause, naming layer and rank.
    """

    layer: int | None
    rank: int
    is_lease_expired: bool
    message: str


class JobPush:
    """One job's place in the pipeline of its session."""

    def __init__(
        self,
        *,
        pipeline: PushPipeline,
        job: PushJob,
        loop: asyncio.AbstractEventLoop,
        rank: int,
        on_failure: Callable[[PushFailed], None],
    ) -> None:
        """Take the collaborators; `on_failure` is called on the loop."""
        self._pipeline = pipeline
        self._job = job
        self._loop = loop
        self._rank = rank
        self._on_failure = on_failure

    def submit(self, *, layer: int, rows: RowRange, chunk: int, event: Event) -> None:
        """Queue rows for the push; called on the compute thread, never waits.

        What the pipeline cannot take ends this job and leaves the others of the step alone.
        """
        try:
            self._pipeline.submit(self._job, layer=layer, rows=rows, chunk=chunk, event=event)
        except KvTransferError as error:
            failed = describe_failure(PushFailure(layer=layer, rank=self._rank, cause=error))
            self._loop.call_soon_threadsafe(self._on_failure, failed)

    def renew(self) -> None:
        """Let the lease count again. A ticket that has ended meanwhile is reported otherwise."""
        self._pipeline.renew(self._job.ticket.id)

    def free_slots(self, slots: Sequence[int]) -> None:
        """Let slots be written again.

        Raises:
            PushRefusedError: A slot is not the ticket's, or was not written.
        """
        self._pipeline.free_slots(self._job.ticket.id, slots)

    def close(self) -> None:
        """Say that everything is written."""
        self._pipeline.finish(self._job.ticket.id)

    def revoke(self, *, on_quiet: Callable[[], None]) -> None:
        """End the push; `on_quiet` is called on the loop when no byte can be written any more."""

        def report(_: "Future[None]") -> None:
            self._loop.call_soon_threadsafe(on_quiet)

        self._pipeline.revoke(self._job.ticket.id).add_done_callback(report)


class SessionPusher:
    """Pushes to one decode service."""

    def __init__(
        self,
        *,
        pipeline: PushPipeline,
        link: WriterLink,
        loop: asyncio.AbstractEventLoop,
        rank: int,
        close_timeout_s: float,
    ) -> None:
        """Take the pipeline and the link it writes over; both are closed by `close`."""
        self._pipeline = pipeline
        self._link = link
        self._loop = loop
        self._rank = rank
        self._close_timeout_s = close_timeout_s

    def open_job(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        *,
        on_receipt: Callable[[Receipt], None],
        on_failure: Callable[[PushFailed], None],
    ) -> JobPush:
        """Take a checked ticket; the callbacks are called on the loop.

        Args:
            ticket: The grant.
            block_ids: Own blocks of the prompt, held by the caller until the push has ended.
            on_receipt: A component's rows were written.
            on_failure: The push ended early by itself.

        Raises:
            KvTransferError: The ticket cannot be taken; nothing will be written.
        """

        def hand_over_receipt(receipt: Receipt) -> None:
            self._loop.call_soon_threadsafe(on_receipt, receipt)

        def hand_over_failure(failure: PushFailure) -> None:
            self._loop.call_soon_threadsafe(on_failure, describe_failure(failure))

        job = PushJob(
            ticket=ticket,
            source_block_ids=block_ids,
            on_receipt=hand_over_receipt,
            on_failure=hand_over_failure,
        )
        self._pipeline.open(job)
        return JobPush(
            pipeline=self._pipeline,
            job=job,
            loop=self._loop,
            rank=self._rank,
            on_failure=on_failure,
        )

    def peer_is_dead(self) -> bool:
        """Tell whether the decode service is gone, or cannot be written to any more."""
        return self._link.peer_is_dead()

    def proves_quiet(self) -> bool:
        """Tell whether a write that has ended is known to have ended in decode's memory too."""
        return self._link.proves_quiet()

    def close(self) -> None:
        """Revoke what is open, end the push threads, then disconnect. Blocks."""
        if not self._pipeline.close(self._close_timeout_s):
            # Closing the link under a running write is what ends that write.
            logger.error("push threads did not end within %s s", self._close_timeout_s)
        self._link.close()


def describe_failure(failure: PushFailure) -> PushFailed:
    """Turn the pipeline's report into one for people and for the wire."""
    where = (
        f"rank {failure.rank}"
        if failure.layer is None
        else (f"layer {failure.layer} rank {failure.rank}")
    )
    return PushFailed(
        layer=failure.layer,
        rank=failure.rank,
        is_lease_expired=isinstance(failure.cause, LeaseExpiredError),
        message=f"push failed at {where}: {failure.cause}",
    )
