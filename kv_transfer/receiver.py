"""All reservations of a decode service, from the grant until the blocks may be used again.

The table never frees a block because time has passed. A block leaves it in one of two ways: its
request committed and has ended (`close`), or its writer is proven quiet (`drained`,
`writer_dead`). Until then the blocks of a revoked ticket stay with the table, at first in REVOKING
and, when the writer does not answer, in QUARANTINED. What a peer may hold there is capped: at the
cap it is granted nothing new.

The life of a reservation is drawn in `session.py`. Owned by one thread, which also owns the block
pool; only the digests of receipts may be computed elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kv_transfer.errors import (
    IncompleteError,
    LayoutError,
    QuarantineFullError,
    StaleTicketError,
)
from kv_transfer.landing import DirectRows, ReceiptCheck, RowLanding
from kv_transfer.layout import KvLayout, RegionMap, placements
from kv_transfer.reservation import Reservation
from kv_transfer.session import ReservationState
from kv_transfer.spans import check_block_ids, check_blocks_cover
from kv_transfer.ticket import Ticket, TicketIssuer

__all__ = [
    "ReapAction",
    "ReapKind",
    "ReceiptCheck",
    "ReceiverLimits",
    "Released",
    "Reservation",
    "ReservationTable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    """Bounds of the table.

    Attributes:
        max_quarantined_blocks_per_peer: At this many, a peer is granted nothing new.
        drain_timeout_s: How long a writer may take to answer a revoke before quarantine.
        probe_interval_s: How often the writer of a quarantined ticket is asked after.
    """

    max_quarantined_blocks_per_peer: int
    drain_timeout_s: float = 2.0
    probe_interval_s: float = 1.0


class ReapKind(Enum):
    """What the owner has to do about a ticket."""

    REVOKE = "revoke"  # its lease ended: begin_revoke, and tell the writer
    QUARANTINE = "quarantine"  # the writer does not answer: quarantine
    PROBE_WRITER = "probe_writer"  # ask the writer, and the engine, whether it is quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapAction:
    """One thing to do."""

    kind: ReapKind
    ticket_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Blocks that nobody writes any more.

    Attributes:
        ticket_id: The ended ticket.
        block_ids: Its blocks.
        was_quarantined: Whether they were in quarantine.
    """

    ticket_id: bytes
    block_ids: tuple[int, ...]
    was_quarantined: bool


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A reservation and the time at which `reap` has something to say about it."""

    reservation: Reservation
    due_s: float


class ReservationTable:
    """All reservations by ticket id."""

    def __init__(
        self,
        *,
        issuer: TicketIssuer,
        layout: KvLayout,
        region: RegionMap,
        memory: memoryview,
        clock: Callable[[], float],
        limits: ReceiverLimits,
    ) -> None:
        """Start empty.

        Args:
            issuer: Made, and verifies, the tickets.
            layout: Own layout.
            region: Own pool as offsets in `memory`.
            memory: The pool's memory.
            clock: Monotonic seconds.
            limits: Bounds.

        Raises:
            LayoutError: The region does not fit the layout or the memory.
        """
        if region.size_bytes > memory.nbytes:
            raise LayoutError("region.size_bytes", region.size_bytes, f"<= {memory.nbytes}")
        self._issuer = issuer
        self._layout = layout
        self._num_blocks = region.num_blocks
        self.places = placements(region, layout)
        self._direct = DirectRows(self.places, memory)
        self._clock = clock
        self._limits = limits
        self._entries: dict[bytes, _Entry] = {}
        self._owners: dict[int, bytes] = {}  # block -> ticket
        self._num_quarantined: dict[str, int] = {}  # peer -> blocks

    def __len__(self) -> int:
        """Return the number of reservations that hold blocks."""
        return len(self._entries)

    def reserve(
        self, ticket: Ticket, *, peer: str, landing: RowLanding | None = None
    ) -> Reservation:
        """Enter a ticket that was issued just now.

        Args:
            ticket: From this table's issuer; its blocks were taken from the pool.
            peer: Names the prefill service across its restarts, e.g. its address.
            landing: Where its rows land; None when they are written into the blocks.

        Raises:
            QuarantineFullError: Too many blocks of this peer are in quarantine.
            LayoutError: A block is not in the pool, or in another reservation, or too few.
            TicketError: The ticket is not one of the issuer's.
        """
        limit = self._limits.max_quarantined_blocks_per_peer
        if self.num_quarantined_blocks(peer) >= limit:
            raise QuarantineFullError(
                f"{self.num_quarantined_blocks(peer)} blocks wait for the end of writers of "
                f"{peer}, the limit is {limit}"
            )
        self._issuer.verify_ticket(ticket)
        check_block_ids("ticket.block_ids", ticket.block_ids, self._num_blocks)
        check_blocks_cover(ticket.block_ids, self._layout.block_size, ticket.rows)
        for block_id in ticket.block_ids:
            if block_id in self._owners:
                raise LayoutError("ticket.block_ids", block_id, "in no other reservation")
        reservation = Reservation(
            ticket=ticket,
            peer=peer,
            issuer=self._issuer,
            layout=self._layout,
            landing=landing if landing is not None else self._direct,
        )
        self._entries[ticket.id] = _Entry(
            reservation=reservation, due_s=self._clock() + ticket.lease_s
        )
        self._owners.update(dict.fromkeys(ticket.block_ids, ticket.id))
        return reservation

    def get(self, ticket_id: bytes) -> Reservation:
        """Return a reservation that holds blocks.

        Raises:
            StaleTicketError: There is none.
        """
        return self._entry(ticket_id).reservation

    def reservations(self) -> list[Reservation]:
        """Return all that hold blocks."""
        return [entry.reservation for entry in self._entries.values()]

    def num_quarantined_blocks(self, peer: str) -> int:
        """Return how many blocks wait for the end of this peer's writers."""
        return self._num_quarantined.get(peer, 0)

    def renew(self, ticket_id: bytes) -> None:
        """Note that a Renew is being sent: the own lease clock starts again.

        Raises:
            StaleTicketError: There is no such reservation.
        """
        entry = self._entry(ticket_id)
        if entry.reservation.state in (ReservationState.RESERVED, ReservationState.RECEIVING):
            entry.due_s = self._clock() + entry.reservation.ticket.lease_s

    def commit(self, ticket_id: bytes) -> None:
        """Hand the KV to the request; the ticket takes nothing more.

        Raises:
            StaleTicketError: There is no such reservation.
            IncompleteError: The receipts do not tile the grant.
            IllegalTransitionError: It was revoked or committed before.
        """
        entry = self._entry(ticket_id)
        if not entry.reservation.is_complete:
            raise IncompleteError(
                f"{entry.reservation.num_missing_rows} rows of ticket {ticket_id.hex()} "
                "are not verified"
            )
        entry.reservation.machine.to(ReservationState.COMMITTED)
        entry.due_s = float("inf")
        self._issuer.retire(ticket_id)

    def close(self, ticket_id: bytes) -> Released:
        """End a committed reservation, because its request has ended.

        Raises:
            StaleTicketError: There is no such reservation.
            IllegalTransitionError: It is not committed: use `begin_revoke`.
        """
        return self._release(self._entry(ticket_id), ReservationState.CLOSED)

    def begin_revoke(self, ticket_id: bytes) -> bool:
        """Stop taking receipts after any fault; the blocks stay until the writer is quiet.

        Returns:
            False when the ticket was being revoked already.

        Raises:
            StaleTicketError: There is no such reservation.
            IllegalTransitionError: It is committed: its writer has ended, use `close`.
        """
        entry = self._entry(ticket_id)
        machine = entry.reservation.machine
        if machine.state in (ReservationState.REVOKING, ReservationState.QUARANTINED):
            return False
        machine.to(ReservationState.REVOKING)
        entry.due_s = self._clock() + self._limits.drain_timeout_s
        self._issuer.retire(ticket_id)
        return True

    def quarantine(self, ticket_id: bytes) -> tuple[int, ...]:
        """Set the blocks of a revoked ticket apart, because its writer does not answer.

        Returns:
            The blocks, which now count against the peer's cap.

        Raises:
            StaleTicketError: There is no such reservation.
            IllegalTransitionError: It is not being revoked.
        """
        entry = self._entry(ticket_id)
        reservation = entry.reservation
        reservation.machine.to(ReservationState.QUARANTINED)
        num_blocks = len(reservation.ticket.block_ids)
        self._num_quarantined[reservation.peer] = (
            self.num_quarantined_blocks(reservation.peer) + num_blocks
        )
        entry.due_s = self._clock() + self._limits.probe_interval_s
        return reservation.ticket.block_ids

    def drained(self, ticket_id: bytes) -> Released | None:
        """Take the writer's word that it writes nothing more under a revoked ticket.

        Returns:
            The blocks; None when the ticket has ended before (a second Drained is harmless).

        Raises:
            IllegalTransitionError: The ticket was not revoked.
        """
        entry = self._entries.get(ticket_id)
        return None if entry is None else self._release(entry, ReservationState.FREED)

    def writer_dead(self, prefill_incarnation: str) -> list[Released]:
        """Take the proof that a prefill process has ended.

        Only revoked tickets are freed. For the others the owner first calls `begin_revoke`, which
        ends the request that waits for them.

        Returns:
            The blocks of all revoked tickets of that incarnation.
        """
        revoked = (ReservationState.REVOKING, ReservationState.QUARANTINED)
        return [
            self._release(entry, ReservationState.FREED)
            for entry in list(self._entries.values())
            if entry.reservation.ticket.prefill_incarnation == prefill_incarnation
            and entry.reservation.state in revoked
        ]

    def reap(self, now_s: float) -> list[ReapAction]:
        """Say what is overdue. Frees nothing and changes no state; each probe is said once per
        interval, the rest until it is done.
        """
        actions: list[ReapAction] = []
        for ticket_id, entry in self._entries.items():
            if now_s < entry.due_s:
                continue
            state = entry.reservation.state
            if state is ReservationState.QUARANTINED:
                entry.due_s = now_s + self._limits.probe_interval_s
                kind = ReapKind.PROBE_WRITER
            elif state is ReservationState.REVOKING:
                kind = ReapKind.QUARANTINE
            else:
                kind = ReapKind.REVOKE
            actions.append(ReapAction(kind=kind, ticket_id=ticket_id))
        return actions

    def _entry(self, ticket_id: bytes) -> _Entry:
        entry = self._entries.get(ticket_id)
        if entry is None:
            raise StaleTicketError(ticket_id)
        return entry

    def _release(self, entry: _Entry, end_state: ReservationState) -> Released:
        """Move to a terminal state and let go of the blocks."""
        reservation = entry.reservation
        was_quarantined = reservation.state is ReservationState.QUARANTINED
        reservation.machine.to(end_state)
        ticket = reservation.ticket
        if was_quarantined:
            self._num_quarantined[reservation.peer] -= len(ticket.block_ids)
            if not self._num_quarantined[reservation.peer]:
                del self._num_quarantined[reservation.peer]
        for block_id in ticket.block_ids:
            del self._owners[block_id]
        del self._entries[ticket.id]
        return Released(
            ticket_id=ticket.id, block_ids=ticket.block_ids, was_quarantined=was_quarantined
        )
