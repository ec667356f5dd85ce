"""Rows that come through a staging ring, with an engine that cannot prove the end of a writer.

A prefill service writes into slots of a ring of its own. What has arrived is verified and copied
into blocks by us, so only the copy of a receipt at hand stands between a revoked ticket and the
reuse of its blocks. Its slots come back when prefill says that it has ended; if it does not, the
ring is fenced: the engine's receiver is killed, after which nothing lands, and the next handshake
gets a new ring.

    open -> (retired) -> closed          when the last ticket has ended
      +---- fenced ------> closed        at once

Event loop thread only.
"""

import asyncio
import logging
from collections.abc import Callable

from decode_service.block_queue import BlockQueue
from decode_service.landing import Revocation
from kv_transfer.engine.base import TargetMemory, TransferEngine
from kv_transfer.landing import PoolMemory, StagedRows
from kv_transfer.layout import KvLayout, StagingMap
from kv_transfer.receiver import ReservationTable
from kv_transfer.reservation import Reservation
from kv_transfer.ticket import Ticket
from serving_core.block_pool import BlockPool
from serving_core.errors import PrefillUnavailableError
from serving_core.rpc import wire

logger = logging.getLogger(__name__)

# One is being written, one is under way to us, one is being verified, one is on its way back.
SLOTS_PER_TICKET = 4
_RETRY_AFTER_S = 1.0


class StagedLanding:
    """The ring of one prefill service."""

    def __init__(
        self,
        *,
        target: TargetMemory,
        ring: StagingMap,
        rows: StagedRows,
        table: ReservationTable,
        blocks: BlockQueue,
        max_waiting: int,
        on_fence: Callable[[], None],
    ) -> None:
        """Own the target.

        Args:
            target: The ring's memory.
            ring: Its slots.
            rows: Copies what has arrived into blocks.
            table: All reservations.
            blocks: Where blocks go back to.
            max_waiting: Most tickets that wait for slots.
            on_fence: Called when the ring is fenced.
        """
        self.region = wire.region_to_proto(ring, target.descriptor)
        self._target = target
        self._rows = rows
        self._table = table
        self._blocks = blocks
        self._slots = BlockQueue(
            BlockPool(ring.num_slots), max_waiting=max_waiting, retry_after_s=_RETRY_AFTER_S
        )
        self._num_slots_per_ticket = min(SLOTS_PER_TICKET, ring.num_slots)
        self._on_fence = on_fence
        self._num_tickets = 0
        self._is_retired = False
        self._closing: asyncio.Task[None] | None = None

    async def take_slots(self) -> tuple[int, ...]:
        """As the protocol says."""
        self._num_tickets += 1
        try:
            slots = await self._slots.take(self._num_slots_per_ticket)
        except BaseException:
            self._leave()
            raise
        if self._closing is not None:
            self.give_back_slots(slots)
            raise PrefillUnavailableError("the staging ring was closed")
        return slots

    def give_back_slots(self, slots: tuple[int, ...]) -> None:
        """As the protocol says."""
        self._slots.give_back(slots)
        self._leave()

    def reserve(self, ticket: Ticket, *, peer: str) -> Reservation:
        """As the protocol says."""
        return self._table.reserve(ticket, peer=peer, landing=self._rows)

    def committed(self, ticket: Ticket) -> None:
        """As the protocol says: the slots are empty."""
        self.give_back_slots(ticket.slots)

    def begin_revoke(self, ticket: Ticket) -> None:
        """As the protocol says. The blocks are free at once: no remote writer reaches them."""
        self._table.begin_revoke(ticket.id)
        released = self._table.drained(ticket.id)
        assert released is not None  # it was there a moment ago
        self._blocks.give_back(released.block_ids)

    async def reclaim(self, revocation: Revocation, *, is_quiet: bool) -> None:
        """As the protocol says: the slots are free, or the ring is no more."""
        if not is_quiet:
            revocation.peer.invalidate(revocation.session, "its staging ring was fenced")
            if self._closing is None:
                logger.warning("fenced ticket_id=%s", revocation.ticket.id.hex())
                self._on_fence()
            await self._close()
        self.give_back_slots(revocation.ticket.slots)

    async def retire(self) -> None:
        """As the protocol says."""
        self._is_retired = True
        if self._num_tickets == 0:
            await self._close()

    def _leave(self) -> None:
        self._num_tickets -= 1
        if self._is_retired and self._num_tickets == 0:
            self._start_closing()

    async def _close(self) -> None:
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = asyncio.create_task(asyncio.to_thread(self._target.close))
        return self._closing


class StagedLandings:
    """Makes a ring for each handshake."""

    def __init__(
        self,
        *,
        engine: TransferEngine,
        ring: StagingMap,
        layout: KvLayout,
        pool: PoolMemory,
        table: ReservationTable,
        blocks: BlockQueue,
        max_waiting: int,
        on_fence: Callable[[], None],
    ) -> None:
        """Take the collaborators.

        Args:
            engine: Makes the memory of the rings.
            ring: The slots of each ring.
            layout: Own layout.
            pool: The blocks' memory.
            table: All reservations.
            blocks: The pool.
            max_waiting: Most tickets that wait for slots of one ring.
            on_fence: Called when a ring is fenced.

        Raises:
            LayoutError: A row of the layout does not fit a slot.
        """
        ring.rows_per_slot(layout)
        self._engine = engine
        self._ring = ring
        self._layout = layout
        self._pool = pool
        self._table = table
        self._blocks = blocks
        self._max_waiting = max_waiting
        self._on_fence = on_fence
        self._targets: list[TargetMemory] = []

    async def open(self) -> StagedLanding:
        """As the protocol says; an engine starts for it."""
        target = await asyncio.to_thread(self._engine.create_target, self._ring.size_bytes)
        self._targets = [other for other in self._targets if other.buffer.nbytes]
        self._targets.append(target)
        rows = StagedRows(
            places=self._table.places,
            layout=self._layout,
            pool=self._pool,
            ring=self._ring,
            ring_memory=target.buffer,
        )
        return StagedLanding(
            target=target,
            ring=self._ring,
            rows=rows,
            table=self._table,
            blocks=self._blocks,
            max_waiting=self._max_waiting,
            on_fence=self._on_fence,
        )

    async def close(self) -> None:
        """As the protocol says."""
        for target in self._targets:
            await asyncio.to_thread(target.close)
        self._targets.clear()
