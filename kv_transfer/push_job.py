"""What the push pipeline is given for one ticket, and what it keeps while the ticket is open."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.errors import EventTimeoutError, KvTransferError, PushCrashedError
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, Ticket

# The writer stops by itself this early, so that its clock may run slower than the owner's.
WRITABLE_SHARE_OF_LEASE = 0.8


class PushEvent(Protocol):
    """Completes when the rows of an item are in the source memory."""

    def synchronize(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` (0 only asks) and tell whether it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailure:
    """Why a ticket ended; no byte of it is written after this was reported.

    Attributes:
        layer: Layer that failed or came next; None if no layer is concerned.
        rank: The rank that reports.
        cause: A `LeaseExpiredError`, `EventTimeoutError`, `PeerDeadError`, `WriteFaultError`, ...
    """

    layer: int | None
    rank: int
    cause: KvTransferError


def _ignore_done() -> None:
    """Serve owners who count receipts instead of waiting for `on_done`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushJob:
    """One ticket to write under.

    The callbacks are called on a push thread, or inside the pipeline call that causes them, never
    two at once for one job. They must not block; an event loop hands over with
    `call_soon_threadsafe`. After `on_failure` or `on_done` none is called any more.

    Attributes:
        ticket: The grant. Its lease counts from `open`.
        source_block_ids: Own blocks of the sequence, from row 0 on. The owner must hold them until
            done, failed or quiet.
        on_receipt: A component's rows were written.
        on_failure: The ticket ended early by itself; called at most once.
        on_done: `finish` was called and everything is written; called at most once.
    """

    ticket: Ticket
    source_block_ids: tuple[int, ...]
    on_receipt: Callable[[Receipt], None]
    on_failure: Callable[[PushFailure], None]
    on_done: Callable[[], None] = _ignore_done


@dataclass(slots=True, kw_only=True, eq=False)
class PushItem:
    """Rows of one layer that wait for their event and their turn."""

    layer: int
    rows: RowRange
    chunk: int
    event: PushEvent
    sequence: int
    deadline_s: float
    error: KvTransferError | None = None
    slot: int | None = None

    def poll(self, timeout_s: float) -> bool:
        """Tell whether the item can be taken: its event is complete, or has failed."""
        if self.error is not None:
            return True
        try:
            return self.event.synchronize(timeout_s)
        except Exception as error:  # a device fault ends the ticket, not the push thread
            self.error = PushCrashedError(f"the event of layer {self.layer} failed: {error}")
            self.error.__cause__ = error
            return True

    def expire(self) -> None:
        """Give up waiting for the event."""
        self.error = EventTimeoutError(f"rows {self.rows} of layer {self.layer} were not computed")


def _quiet_future() -> "Future[None]":
    future: Future[None] = Future()
    # A waiter that is cancelled must not cancel the report for everybody else.
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, kw_only=True, eq=False)
class OpenJob:
    """An open ticket. All fields are guarded by the pipeline's lock.

    `is_revoked` and `stop_at_s` are also read without it, by the writing thread between two
    pieces: an outdated value there costs one more piece.

    Attributes:
        job: What was asked.
        stop_at_s: When the writer stops by itself.
        next_rows: First row of each layer that was not submitted yet.
        free_slots: Slots that may be written; None where rows go straight into blocks.
        items: What waits, in submit order.
        is_writing: Whether a thread is at one of its items.
        is_revoked: Whether it must end without a word.
        is_finished: Whether all items were submitted.
        quiet: Set when no byte of the ticket can be written any more, if it was revoked.
    """

    job: PushJob
    stop_at_s: float
    next_rows: list[int]
    free_slots: deque[int] | None = None
    items: deque[PushItem] = field(default_factory=deque)
    is_writing: bool = False
    is_revoked: bool = False
    is_finished: bool = False
    quiet: "Future[None]" = field(default_factory=_quiet_future)

    @property
    def ticket_id(self) -> bytes:
        """Id of the ticket."""
        return self.job.ticket.id

    @property
    def is_done(self) -> bool:
        """Whether everything was submitted and written."""
        return self.is_finished and not self.items and not self.is_writing

    @property
    def can_be_taken(self) -> bool:
        """Whether an item waits that nothing but its event may hold up."""
        return bool(self.items) and not self.is_writing and self.free_slots != deque()

    def take_item(self) -> PushItem:
        """Hand out the first item together with a slot, if it needs one."""
        item = self.items.popleft()
        if self.free_slots is not None:
            item.slot = self.free_slots.popleft()
        self.is_writing = True
        return item

    def renew(self, now_s: float) -> None:
        """Let the lease count again."""
        self.stop_at_s = now_s + self.job.ticket.lease_s * WRITABLE_SHARE_OF_LEASE
