"""Tickets: decode's permission to write rows; receipts: prefill's word that they were written.

A ticket's authentication code is an HMAC over all its fields with a random key that is made with
the issuer and never leaves it. The issuer is also the only verifier: receipts echo the code, so a
receipt for another incarnation, another grant or a made-up ticket is refused.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass, field, replace

from kv_transfer.errors import LayoutError, StaleTicketError, TicketMacError
from kv_transfer.spans import RowRange

TICKET_ID_BYTES = 16
MAC_BYTES = 16
_DOMAIN = b"tandem-ticket-v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Permission to write one range of token rows into listed blocks, once.

    Attributes:
        id: 128 random bits made by decode.
        decode_incarnation: The decode process that issued it.
        prefill_incarnation: The only prefill process that may use it.
        block_ids: Decode's blocks of the sequence in logical order, from row 0 on.
        rows: Granted token rows.
        lease_s: How long the grant lasts from its receipt, and again from each renewal.
        mac: Authenticates all other fields; a secret between the two incarnations.
        slots: Slots of the staging ring that belong to the ticket; empty where rows are written
            straight into the blocks.
    """

    id: bytes
    decode_incarnation: str
    prefill_incarnation: str
    block_ids: tuple[int, ...]
    rows: RowRange
    lease_s: float
    mac: bytes = field(repr=False)
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """States that one component's rows of one layer have been written completely.

    Attributes:
        ticket_id: The ticket under which they were written.
        ticket_mac: Echo of the ticket's code.
        layer: Index into `KvLayout.layers`.
        component: Name inside that layer; empty for all components of the layer, packed one after
            the other into a slot.
        rank: The prefill rank that wrote.
        chunk: Number of the prefill chunk, from zero.
        rows: Token rows written.
        size_bytes: Number of bytes written.
        digest: xxh3_64 over the source bytes in ascending row order.
        slot: Slot of the staging ring that holds the rows; None when they are in their blocks.
    """

    ticket_id: bytes
    ticket_mac: bytes = field(repr=False)
    layer: int
    component: str
    rank: int
    chunk: int
    rows: RowRange
    size_bytes: int
    digest: int
    slot: int | None = None


class TicketIssuer:
    """Makes tickets and knows which of them are live. Not thread-safe.

    The number of live tickets is bounded by their owner, who retires each of them.
    """

    def __init__(self, decode_incarnation: str) -> None:
        """Make a new random key for this incarnation."""
        self.decode_incarnation = decode_incarnation
        self._key = secrets.token_bytes(32)
        self._live: dict[bytes, bytes] = {}  # id -> mac

    def issue(
        self,
        *,
        prefill_incarnation: str,
        block_ids: tuple[int, ...],
        rows: RowRange,
        lease_s: float,
        slots: tuple[int, ...] = (),
    ) -> Ticket:
        """Return a new live ticket.

        Raises:
            LayoutError: The lease is not a positive time.
        """
        if not 0 < lease_s < float("inf"):
            raise LayoutError("lease_s", lease_s, "> 0 and finite")
        unsigned = Ticket(
            id=secrets.token_bytes(TICKET_ID_BYTES),
            decode_incarnation=self.decode_incarnation,
            prefill_incarnation=prefill_incarnation,
            block_ids=block_ids,
            rows=rows,
            lease_s=lease_s,
            mac=b"",
            slots=slots,
        )
        ticket = replace(unsigned, mac=self._mac_of(unsigned))
        self._live[ticket.id] = ticket.mac
        return ticket

    def verify(self, ticket_id: bytes, mac: bytes) -> None:
        """Accept an id and code that belong to one live ticket.

        Raises:
            StaleTicketError: The ticket is retired, of another incarnation, or made up.
            TicketMacError: The code is wrong.
        """
        expected = self._live.get(ticket_id)
        if expected is None:
            raise StaleTicketError(ticket_id)
        if not hmac.compare_digest(expected, mac):
            raise TicketMacError(ticket_id)

    def verify_ticket(self, ticket: Ticket) -> None:
        """Accept a ticket whose every field is as it was issued.

        Raises:
            StaleTicketError: The ticket is not live.
            TicketMacError: A field or the code is not as issued.
        """
        self.verify(ticket.id, ticket.mac)
        if not hmac.compare_digest(self._mac_of(ticket), ticket.mac):
            raise TicketMacError(ticket.id)

    def retire(self, ticket_id: bytes) -> None:
        """End a ticket: from now on it is stale. Idempotent."""
        self._live.pop(ticket_id, None)

    def _mac_of(self, ticket: Ticket) -> bytes:
        return hmac.digest(self._key, _encode(ticket), "sha256")[:MAC_BYTES]


def _encode(ticket: Ticket) -> bytes:
    """Encode all fields but the code so that no two different tickets give the same bytes."""
    parts = [
        _DOMAIN,
        ticket.id,
        ticket.decode_incarnation.encode(),
        ticket.prefill_incarnation.encode(),
        struct.pack(f">{len(ticket.block_ids)}Q", *ticket.block_ids),
        struct.pack(">QQ", ticket.rows.start, ticket.rows.end),
        struct.pack(">Q", round(ticket.lease_s * 1e9)),  # whole nanoseconds, as on the wire
        struct.pack(f">{len(ticket.slots)}Q", *ticket.slots),
    ]
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)
