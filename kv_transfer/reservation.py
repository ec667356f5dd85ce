"""One reservation of decode memory: takes receipts until they tile the grant.

A receipt is accepted in three steps, so that the costly one may run on an executor:

    check = reservation.begin(receipt)     owner's thread: fields, range, no row twice
    digest = check.land()                  any thread: looks at the bytes, moves staged ones
    reservation.confirm(check, digest)     owner's thread: the rows count as landed

Any error of them means that the ticket must be revoked. A check that is landing counts as a writer
of the blocks: its owner waits for it before they are given to anybody else.
"""

from collections.abc import Sequence

from kv_transfer.errors import (
    DigestMismatchError,
    ReceiptFieldError,
    ReceiptOverlapError,
    ReceiptStateError,
    StaleTicketError,
)
from kv_transfer.landing import ReceiptCheck, RowLanding
from kv_transfer.layout import KvLayout
from kv_transfer.row_cover import RowCover
from kv_transfer.session import ReservationState, StateMachine, reservation_state_machine
from kv_transfer.ticket import Receipt, Ticket, TicketIssuer


class Reservation:
    """The blocks of one ticket. Owned by one thread; `ReservationTable` moves its state."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        peer: str,
        issuer: TicketIssuer,
        layout: KvLayout,
        landing: RowLanding,
    ) -> None:
        """Start in RESERVED.

        Args:
            ticket: The grant; checked by the table.
            peer: Names the prefill service, whatever its incarnation.
            issuer: Checks the codes of receipts.
            layout: Own layout.
            landing: Where the rows land.
        """
        self.ticket = ticket
        self.peer = peer
        self.machine: StateMachine[ReservationState] = reservation_state_machine()
        self._issuer = issuer
        self._layout = layout
        self._landing = landing
        self._claimed: dict[tuple[int, str], RowCover] = {
            (index, component.name): RowCover()
            for index, layer in enumerate(layout.layers)
            for component in layer.components
        }
        # Claimed rows are inside the grant and never overlap, so counting them proves the tiling.
        self._num_missing_rows = len(ticket.rows) * layout.num_components

    @property
    def state(self) -> ReservationState:
        """Where it is in its life."""
        return self.machine.state

    @property
    def is_complete(self) -> bool:
        """Whether verified receipts tile the grant, once for every layer and component."""
        return self._num_missing_rows == 0

    @property
    def num_missing_rows(self) -> int:
        """Rows that are not verified yet, summed over layers and components."""
        return self._num_missing_rows

    def accept(self, receipt: Receipt) -> None:
        """Do all three steps on this thread.

        Raises:
            TicketError, ReceiptError: As `begin` and `confirm`.
        """
        check = self.begin(receipt)
        self.confirm(check, check.land())

    def begin(self, receipt: Receipt) -> ReceiptCheck:
        """Check everything but the bytes, and claim the rows.

        Raises:
            StaleTicketError: The ticket is another one, or not live any more.
            TicketMacError: The code is wrong: not the incarnation that the ticket was made for.
            ReceiptStateError: The reservation takes no receipts.
            ReceiptFieldError: A field is outside the grant or the layout.
            ReceiptOverlapError: A row was reported before.
        """
        if receipt.ticket_id != self.ticket.id:
            raise StaleTicketError(receipt.ticket_id)
        self._issuer.verify(receipt.ticket_id, receipt.ticket_mac)
        self._check_receiving()
        names = self._landing.components(receipt)
        self._check_fields(receipt, names)
        check = self._landing.check(receipt, self.ticket)
        for name in names:
            claimed = self._claimed[receipt.layer, name]
            if not claimed.add(receipt.rows):
                raise ReceiptOverlapError(
                    f"layer {receipt.layer} component {name} rows {receipt.rows} "
                    f"overlap {', '.join(map(str, claimed.ranges()))}"
                )
        if self.state is ReservationState.RESERVED:
            self.machine.to(ReservationState.RECEIVING)
        return check

    def confirm(self, check: ReceiptCheck, digest: int) -> None:
        """Count the rows of a begun check as landed; once per check.

        Raises:
            ReceiptStateError: The reservation was revoked meanwhile.
            DigestMismatchError: The memory does not hold what was sent.
        """
        self._check_receiving()
        receipt = check.receipt
        if digest != receipt.digest:
            raise DigestMismatchError(
                layer=receipt.layer,
                component=receipt.component,
                rank=receipt.rank,
                rows=receipt.rows,
                sent=receipt.digest,
                found=digest,
            )
        self._num_missing_rows -= len(receipt.rows) * self._layout.num_covered(
            receipt.layer, receipt.component
        )

    def _check_receiving(self) -> None:
        if self.state not in (ReservationState.RESERVED, ReservationState.RECEIVING):
            raise ReceiptStateError(
                f"ticket {self.ticket.id.hex()} is {self.state.value} and takes no receipts"
            )

    def _check_fields(self, receipt: Receipt, names: Sequence[str]) -> None:
        if not 0 <= receipt.rank < self._layout.num_ranks:
            raise ReceiptFieldError("rank", receipt.rank, f"0 <= rank < {self._layout.num_ranks}")
        if receipt.chunk < 0:
            raise ReceiptFieldError("chunk", receipt.chunk, ">= 0")
        if not self.ticket.rows.contains(receipt.rows):
            raise ReceiptFieldError("rows", receipt.rows, f"inside {self.ticket.rows}")
        row_bytes = sum(
            component.row_bytes
            for component in self._layout.layers[receipt.layer].components
            if component.name in names
        )
        num_bytes = len(receipt.rows) * row_bytes
        if receipt.size_bytes != num_bytes:
            raise ReceiptFieldError("size_bytes", receipt.size_bytes, num_bytes)
