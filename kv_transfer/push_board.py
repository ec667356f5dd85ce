"""Which tickets are open, whose turn it is, and which ids must never be written under again.

Pure bookkeeping: no thread, no lock, no clock of its own. Tickets with waiting items take turns;
the items of one ticket keep their order and at most one of them is taken at a time. An id that
ended is buried: it is refused until every message that could still carry it is long gone.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.errors import PushQueueFullError, PushRefusedError
from kv_transfer.push_job import OpenJob, PushEvent, PushItem, PushJob
from kv_transfer.spans import RowRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """Bounds of one pipeline.

    At most `max_jobs * max_queued_chunks * num_layers` items wait, and `max_buried` ids are kept.

    Attributes:
        max_jobs: Tickets that are open at one time.
        max_queued_chunks: Chunks of one ticket that wait to be written.
        event_timeout_s: Longest time from submit until the rows are computed.
        buried_s: How long an ended ticket's id is remembered; longer than any message is under way.
        max_buried: Ids remembered at one time; when all are taken no ticket is opened.
    """

    max_jobs: int = 1024
    max_queued_chunks: int = 1024
    event_timeout_s: float = 30.0
    buried_s: float = 300.0
    max_buried: int = 1 << 18


def _any_number(layer: int) -> int | None:  # noqa: ARG001  one answer for every layer
    return None


class PushBoard:
    """Open tickets of one pipeline. Guarded by its owner's lock."""

    def __init__(
        self,
        *,
        num_layers: int,
        limits: PushLimits,
        max_rows: Callable[[int], int | None] = _any_number,
        uses_slots: bool = False,
    ) -> None:
        """Start without tickets.

        Args:
            num_layers: Layers of the model.
            limits: Bounds.
            max_rows: Most rows of one item, by layer; None for any number.
            uses_slots: Whether an item needs a slot of its ticket.
        """
        self._num_layers = num_layers
        self._limits = limits
        self._max_rows = max_rows
        self._uses_slots = uses_slots
        self._max_items_per_job = limits.max_queued_chunks * num_layers
        self._open: dict[bytes, OpenJob] = {}
        self._turns: deque[OpenJob] = deque()  # those that can be taken
        self._buried: OrderedDict[bytes, float] = OrderedDict()  # id -> when to forget it
        self._next_sequence = 0
        # No open ticket stops before this time; renewals may make it too early, never too late.
        self._next_stop_s = float("inf")

    @property
    def num_open(self) -> int:
        """Number of open tickets."""
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Number of waiting items."""
        return sum(len(entry.items) for entry in self._open.values())

    @property
    def next_stop_s(self) -> float:
        """Earliest time at which a lease may end; infinite without tickets."""
        return self._next_stop_s

    def get(self, ticket_id: bytes) -> OpenJob | None:
        """Return an open ticket."""
        return self._open.get(ticket_id)

    def all_open(self) -> list[OpenJob]:
        """Return the open tickets."""
        return list(self._open.values())

    def open(self, job: PushJob, now_s: float) -> None:
        """Open a ticket that was never seen; its lease counts from now.

        Raises:
            PushRefusedError: The id is open or ended.
            PushQueueFullError: Too many tickets are open or remembered.
        """
        self._forget_old(now_s)
        ticket_id = job.ticket.id
        if ticket_id in self._open or ticket_id in self._buried:
            raise PushRefusedError("ticket.id", ticket_id.hex(), "an id that was not used before")
        if len(self._open) >= self._limits.max_jobs:
            raise PushQueueFullError(f"{self._limits.max_jobs} tickets are open already")
        # Every open ticket will need a place among the buried.
        if len(self._open) + len(self._buried) >= self._limits.max_buried:
            raise PushQueueFullError(f"{self._limits.max_buried} ticket ids are remembered already")
        first_row = job.ticket.rows.start
        entry = OpenJob(
            job=job,
            stop_at_s=0.0,
            next_rows=[first_row] * self._num_layers,
            free_slots=deque(job.ticket.slots) if self._uses_slots else None,
        )
        entry.renew(now_s)
        self._next_stop_s = min(self._next_stop_s, entry.stop_at_s)
        self._open[ticket_id] = entry

    def submit(
        self,
        entry: OpenJob,
        *,
        layer: int,
        rows: RowRange,
        chunk: int,
        event: PushEvent,
        now_s: float,
    ) -> None:
        """Queue rows of one layer behind the ticket's earlier items.

        Raises:
            PushRefusedError: The layer or rows are not granted, or were submitted before.
            PushQueueFullError: Too many items of the ticket wait.
        """
        if not 0 <= layer < self._num_layers:
            raise PushRefusedError("layer", layer, f"0 <= layer < {self._num_layers}")
        granted = entry.job.ticket.rows
        if not granted.contains(rows):
            raise PushRefusedError("rows", rows, f"inside {granted}")
        if rows.start < entry.next_rows[layer]:
            raise PushRefusedError("rows.start", rows.start, f">= {entry.next_rows[layer]}")
        if entry.is_finished:
            raise PushRefusedError("ticket", entry.ticket_id.hex(), "not finished")
        parts = _split(rows, self._max_rows(layer))
        if len(entry.items) + len(parts) > self._max_items_per_job:
            raise PushQueueFullError(f"{self._max_items_per_job} items of one ticket wait already")
        entry.next_rows[layer] = rows.end
        for part in parts:
            item = PushItem(
                layer=layer,
                rows=part,
                chunk=chunk,
                event=event,
                sequence=self._next_sequence,
                deadline_s=now_s + self._limits.event_timeout_s,
            )
            self._next_sequence += 1
            entry.items.append(item)
        self._line_up(entry)

    def free_slots(self, entry: OpenJob, slots: Sequence[int]) -> None:
        """Let slots be written again.

        Raises:
            PushRefusedError: One of them is not the ticket's, or was not written.
        """
        for slot in slots:
            if entry.free_slots is None or slot not in entry.job.ticket.slots:
                raise PushRefusedError("slot", slot, "a slot of the ticket")
            if slot in entry.free_slots:
                raise PushRefusedError("slot", slot, "a slot that was written")
            entry.free_slots.append(slot)
        self._line_up(entry)

    def _line_up(self, entry: OpenJob) -> None:
        """Give a ticket its turn as soon as it can be taken."""
        if entry.can_be_taken and entry not in self._turns:
            self._turns.append(entry)

    def take(self, now_s: float) -> tuple[OpenJob, PushItem] | None:
        """Hand out the next item whose event is complete; its ticket is being written from now.

        An item whose event failed or came too late is handed out with its `error` set.
        """
        for _ in range(len(self._turns)):
            entry = self._turns.popleft()
            item = entry.items[0]
            if not item.poll(0.0):
                if now_s < item.deadline_s:
                    self._turns.append(entry)
                    continue
                item.expire()
            entry.take_item()
            return entry, item
        return None

    def oldest_waiting(self) -> PushItem | None:
        """Return the item that waits longest, whose event will complete first."""
        return min((entry.items[0] for entry in self._turns), key=_sequence, default=None)

    def put_back(self, entry: OpenJob) -> None:
        """End the write of an item; the ticket stays open."""
        entry.is_writing = False
        # Its lease may have ended during the write, when `expired` left it out.
        self._next_stop_s = min(self._next_stop_s, entry.stop_at_s)
        self._line_up(entry)

    def close(self, entry: OpenJob, now_s: float) -> None:
        """End a ticket for good."""
        del self._open[entry.ticket_id]
        if entry in self._turns:
            self._turns.remove(entry)
        entry.items.clear()
        entry.is_writing = False
        if not self._open:
            self._next_stop_s = float("inf")
        self._bury(entry.ticket_id, now_s)

    def bury_unknown(self, ticket_id: bytes, now_s: float) -> None:
        """Remember an id that is not open, so that it is never opened. Idempotent.

        Raises:
            PushQueueFullError: Too many ids are remembered.
        """
        self._forget_old(now_s)
        if ticket_id in self._buried:
            return
        if len(self._open) + len(self._buried) >= self._limits.max_buried:
            raise PushQueueFullError(f"{self._limits.max_buried} ticket ids are remembered already")
        self._bury(ticket_id, now_s)

    def expired(self, now_s: float) -> list[OpenJob]:
        """Return the tickets whose lease ended and that no thread is writing."""
        if now_s < self._next_stop_s:
            return []
        entries = self._open.values()
        ended = [entry for entry in entries if entry.stop_at_s <= now_s and not entry.is_writing]
        # A ticket that is being written is stopped by the write itself.
        later = [entry.stop_at_s for entry in entries if entry.stop_at_s > now_s]
        self._next_stop_s = min(later, default=float("inf"))
        return ended

    def _bury(self, ticket_id: bytes, now_s: float) -> None:
        self._buried[ticket_id] = now_s + self._limits.buried_s

    def _forget_old(self, now_s: float) -> None:
        """Drop what was remembered long enough; all are kept equally long, so oldest come first."""
        while self._buried:
            ticket_id, until_s = next(iter(self._buried.items()))
            if until_s > now_s:
                return
            del self._buried[ticket_id]


def _split(rows: RowRange, max_rows: int | None) -> list[RowRange]:
    if max_rows is None:
        return [rows]
    starts = range(rows.start, rows.end, max_rows)
    return [RowRange(start, min(start + max_rows, rows.end)) for start in starts]


def _sequence(item: PushItem) -> int:
    return item.sequence
