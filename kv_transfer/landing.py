"""Where the rows of a receipt have landed, and what is left to do until they are in their blocks.

With an engine that writes straight into blocks, a look at the bytes is all. Rows that come through
a staging ring are taken out of their slot, looked at and then put into their blocks, so a late
write into a slot can never reach a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.digest import digest_rows
from kv_transfer.errors import ReceiptFieldError
from kv_transfer.layout import KvLayout, StagingMap
from kv_transfer.spans import ByteSpan, Placement, byte_spans
from kv_transfer.ticket import Receipt, Ticket


class ReceiptCheck(Protocol):
    """A receipt whose fields are right and whose bytes are to be checked."""

    @property
    def receipt(self) -> Receipt:
        """The receipt."""

    def land(self) -> int:
        """Return the digest of what is there; put it into the blocks if it is right and elsewhere.

        Thread-safe. Until it returns it counts as a writer of the blocks.
        """


class RowLanding(Protocol):
    """Chosen once per writer."""

    def components(self, receipt: Receipt) -> Sequence[str]:
        """Return the components of the layer that the receipt covers.

        Raises:
            ReceiptFieldError: There is no such layer or component.
        """

    def check(self, receipt: Receipt, ticket: Ticket) -> ReceiptCheck:
        """Return how to look at the bytes. The rows are inside the grant.

        Raises:
            ReceiptFieldError: The slot is wrong.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectCheck:
    """Rows that are in their blocks.

    Attributes:
        receipt: The receipt.
        spans: Where the rows lie in `memory`, in digest order.
        memory: The target memory.
    """

    receipt: Receipt
    spans: list[ByteSpan]
    memory: memoryview = field(repr=False)

    def land(self) -> int:
        """As the protocol says: only looks."""
        return digest_rows(self.memory, self.spans)


class DirectRows:
    """The engine writes into the blocks."""

    def __init__(self, places: Mapping[tuple[int, str], Placement], memory: memoryview) -> None:
        """Take the pool: placements are offsets in `memory`."""
        self._places = places
        self._memory = memory

    def components(self, receipt: Receipt) -> Sequence[str]:
        """As the protocol says: one."""
        if (receipt.layer, receipt.component) not in self._places:
            name = f"layer {receipt.layer} component {receipt.component!r}"
            raise ReceiptFieldError("component", name, "a component of the layout")
        return (receipt.component,)

    def check(self, receipt: Receipt, ticket: Ticket) -> DirectCheck:
        """As the protocol says."""
        if receipt.slot is not None:
            raise ReceiptFieldError("slot", receipt.slot, "absent: there is no ring")
        place = self._places[receipt.layer, receipt.component]
        spans = byte_spans(place, ticket.block_ids, receipt.rows)
        return DirectCheck(receipt=receipt, spans=spans, memory=self._memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """The blocks' memory; view and address name the same bytes."""

    view: memoryview = field(repr=False)
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCheck:
    """Rows that are in a slot.

    Attributes:
        receipt: The receipt.
        slot: The slot's part that holds them.
        places: Where they belong in the pool, in the order in which they are packed.
        pool: The blocks' memory.
    """

    receipt: Receipt
    slot: memoryview = field(repr=False)
    places: list[ByteSpan]
    pool: PoolMemory

    def land(self) -> int:
        """As the protocol says: copies what is right.

        The slot is read once. Anybody who reaches the engine's port may change it at any time, so
        what is put into the blocks must be the very bytes that were looked at.
        """
        packed = memoryview(bytes(self.slot))
        digest = digest_rows(packed, [ByteSpan(0, packed.nbytes)])
        if digest == self.receipt.digest:
            at = 0
            for start, num_bytes in self.places:
                self.pool.view[start : start + num_bytes] = packed[at : at + num_bytes]
                at += num_bytes
        return digest


class StagedRows:
    """The engine writes into the slots of a ring."""

    def __init__(
        self,
        *,
        places: Mapping[tuple[int, str], Placement],
        layout: KvLayout,
        pool: PoolMemory,
        ring: StagingMap,
        ring_memory: memoryview,
    ) -> None:
        """Take both memories.

        Args:
            places: Where rows belong in the end, as offsets of the pool.
            layout: Own layout.
            pool: The blocks.
            ring: The slots.
            ring_memory: The target memory.
        """
        self._places = places
        self._layout = layout
        self._pool = pool
        self._ring = ring
        self._ring_memory = ring_memory

    def components(self, receipt: Receipt) -> Sequence[str]:
        """As the protocol says: all of the layer."""
        if not 0 <= receipt.layer < len(self._layout.layers):
            limit = f"0 <= layer < {len(self._layout.layers)}"
            raise ReceiptFieldError("layer", receipt.layer, limit)
        if receipt.component:
            raise ReceiptFieldError("component", receipt.component, "empty: all of the layer")
        return [component.name for component in self._layout.layers[receipt.layer].components]

    def check(self, receipt: Receipt, ticket: Ticket) -> StagedCheck:
        """As the protocol says."""
        if receipt.slot is None or receipt.slot not in ticket.slots:
            raise ReceiptFieldError("slot", receipt.slot, "a slot of the ticket")
        if receipt.size_bytes > self._ring.slot_bytes:
            limit = f"at most a slot of {self._ring.slot_bytes}"
            raise ReceiptFieldError("size_bytes", receipt.size_bytes, limit)
        start = receipt.slot * self._ring.slot_bytes
        places: list[ByteSpan] = []
        for name in self.components(receipt):
            place = self._places[receipt.layer, name]
            places += byte_spans(place, ticket.block_ids, receipt.rows)
        return StagedCheck(
            receipt=receipt,
            slot=self._ring_memory[start : start + receipt.size_bytes],
            places=places,
            pool=self._pool,
        )
