"""Where a prefill service's rows arrive, and how that memory comes back after a fault.

Two kinds, chosen once by the engine. Rows that go straight into blocks make the blocks wait for the
proof that their writer has ended (`direct_landing.py`). Rows that come through a staging ring leave
the blocks to us alone; it is the ring that waits, or is fenced (`staged_landing.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_transfer.reservation import Reservation
from kv_transfer.ticket import Ticket
from tandem.v1 import layout_pb2

if TYPE_CHECKING:
    from decode_service.handoff_stream import HandoffStream
    from decode_service.prefill_peer import PrefillPeer, PrefillSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A granted ticket that must end.

    Attributes:
        ticket: The ticket.
        peer: The prefill service that may write under it.
        session: The handshake under which it was granted.
        stream: Its hand-off.
        cause: For logs on both sides.
    """

    ticket: Ticket
    peer: "PrefillPeer"
    session: "PrefillSession"
    stream: "HandoffStream"
    cause: str


class Landing(Protocol):
    """One place of arrival. Event loop thread only."""

    @property
    def region(self) -> layout_pb2.KvRegion:
        """What the handshake says of it; holds a secret."""

    async def take_slots(self) -> tuple[int, ...]:
        """Wait for what a ticket needs of the ring; empty where there is none.

        Raises:
            OverloadedError: Too many wait.
            PrefillUnavailableError: The ring was closed meanwhile.
        """

    def give_back_slots(self, slots: tuple[int, ...]) -> None:
        """Return slots under which nothing was granted."""

    def reserve(self, ticket: Ticket, *, peer: str) -> Reservation:
        """Enter a ticket that was issued just now.

        Raises:
            KvTransferError: As `ReservationTable.reserve`.
        """

    def committed(self, ticket: Ticket) -> None:
        """Take note that all rows of a ticket have landed and its writer has ended."""

    def begin_revoke(self, ticket: Ticket) -> None:
        """Take no more receipts. No receipt of the ticket may be landing now."""

    async def reclaim(self, revocation: Revocation, *, is_quiet: bool) -> None:
        """Return when the memory of a revoked ticket is free again.

        Args:
            revocation: The ticket.
            is_quiet: Whether prefill has said that it writes nothing more.
        """

    async def retire(self) -> None:
        """Take no new ticket; let go of the memory once the last one has ended."""


class Landings(Protocol):
    """Makes places of arrival."""

    async def open(self) -> Landing:
        """Return one for a new handshake.

        Raises:
            KvTransferError: The memory cannot be had.
        """

    async def close(self) -> None:
        """Let go of all of them."""
