"""Rows that prefill writes straight into our blocks, with an engine that can prove its end.

    revoked -> prefill says drained, or is proven dead -> blocks free
                  |  no answer
                  +-> quarantine -> ask again and again -> blocks free

Time alone frees nothing. Event loop thread only.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc

from decode_service.block_queue import BlockQueue
from decode_service.landing import Revocation
from kv_transfer.engine.base import TargetMemory, WriterState
from kv_transfer.receiver import ReservationTable
from kv_transfer.reservation import Reservation
from kv_transfer.ticket import Ticket
from tandem.v1 import layout_pb2
from tandem.v1 import prefill_service_pb2 as pb

logger = logging.getLogger(__name__)


class DirectLanding:
    """The pool itself; one for all prefill services."""

    def __init__(
        self,
        *,
        region: layout_pb2.KvRegion,
        table: ReservationTable,
        blocks: BlockQueue,
        memory: TargetMemory,
        revoke_timeout_s: float,
        reap_interval_s: float,
        on_quarantine: Callable[[], None],
    ) -> None:
        """Take the collaborators.

        Args:
            region: Where the pool is, for the handshake.
            table: All reservations.
            blocks: Where blocks go back to.
            memory: Knows whether a writer is dead.
            revoke_timeout_s: Longest wait for one answer of a writer.
            reap_interval_s: Pause between two questions about a quarantined ticket.
            on_quarantine: Called after each change of the number of quarantined blocks.
        """
        self.region = region
        self._table = table
        self._blocks = blocks
        self._memory = memory
        self._revoke_timeout_s = revoke_timeout_s
        self._reap_interval_s = reap_interval_s
        self._on_quarantine = on_quarantine

    async def take_slots(self) -> tuple[int, ...]:
        """As the protocol says: there is no ring."""
        return ()

    def give_back_slots(self, slots: tuple[int, ...]) -> None:
        """As the protocol says."""
        assert not slots

    def reserve(self, ticket: Ticket, *, peer: str) -> Reservation:
        """As the protocol says."""
        return self._table.reserve(ticket, peer=peer)

    def committed(self, ticket: Ticket) -> None:
        """As the protocol says: the blocks are the request's."""

    def begin_revoke(self, ticket: Ticket) -> None:
        """As the protocol says; the blocks stay with the table."""
        self._table.begin_revoke(ticket.id)

    async def reclaim(self, revocation: Revocation, *, is_quiet: bool) -> None:
        """As the protocol says."""
        ticket = revocation.ticket
        is_quiet = is_quiet or await self._probe(revocation)
        if not is_quiet:
            self._blocks.quarantine(self._table.quarantine(ticket.id))
            self._on_quarantine()
            logger.warning(
                "quarantined num_blocks=%d ticket_id=%s", len(ticket.block_ids), ticket.id.hex()
            )
        while not is_quiet:
            await asyncio.sleep(self._reap_interval_s)
            is_quiet = await self._probe(revocation)
        self._give_back(ticket)

    async def retire(self) -> None:
        """As the protocol says: other prefill services use it."""

    def _give_back(self, ticket: Ticket) -> None:
        released = self._table.drained(ticket.id)
        assert released is not None  # its revocation alone ends the ticket
        if released.was_quarantined:
            self._blocks.release_quarantine(released.block_ids)
            self._on_quarantine()
        else:
            self._blocks.give_back(released.block_ids)
        logger.info("drained ticket_id=%s", ticket.id.hex())

    async def _probe(self, revocation: Revocation) -> bool:
        """Ask the engine, then the process at the peer's address."""
        incarnation = revocation.ticket.prefill_incarnation
        if self._memory.writer_state(incarnation) is WriterState.DEAD:
            return True
        request = pb.RevokeRequest(ticket_id=revocation.ticket.id, cause=revocation.cause)
        try:
            reply = await revocation.peer.stub.Revoke(request, timeout=self._revoke_timeout_s)
        except grpc.aio.AioRpcError as error:
            logger.info(
                "unary revoke failed status=%s ticket_id=%s",
                error.code().name,
                revocation.ticket.id.hex(),
            )
        else:
            # The word of another process at the same address says nothing about the writer.
            if reply.prefill_incarnation == incarnation:
                return True
        return self._memory.writer_state(incarnation) is WriterState.DEAD


class DirectLandings:
    """Always the same one."""

    def __init__(self, landing: DirectLanding, memory: TargetMemory) -> None:
        """Own the memory."""
        self._landing = landing
        self._memory = memory

    async def open(self) -> DirectLanding:
        """As the protocol says."""
        return self._landing

    async def close(self) -> None:
        """As the protocol says."""
        self._memory.close()
