"""Ends tickets after a fault, and gives their blocks back once their writer is proven quiet.

    begin -> ask on the stream -> ask by a call of its own, or proof of death -> give back
                                     |  no answer
                                     +-> quarantine -> ask again and again -> give back

Time alone frees nothing. Event loop thread only.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from decode_service.block_queue import BlockQueue
from decode_service.handoff_stream import HandoffStream, StreamEnd
from decode_service.prefill_peer import PrefillPeer
from kv_transfer.engine.base import TargetMemory, WriterState
from kv_transfer.receiver import ReservationTable
from kv_transfer.ticket import Ticket
from tandem.v1 import prefill_service_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A granted ticket that must end.

    Attributes:
        ticket: The ticket.
        peer: The prefill service that may write under it.
        stream: Its hand-off.
        cause: For logs on both sides.
    """

    ticket: Ticket
    peer: PrefillPeer
    stream: HandoffStream
    cause: str


class TicketRevoker:
    """All tickets that are being ended; each by a task of its own that no client can cancel."""

    def __init__(
        self,
        *,
        table: ReservationTable,
        blocks: BlockQueue,
        memory: TargetMemory,
        revoke_timeout_s: float,
        reap_interval_s: float,
        on_quarantine: Callable[[], None],
    ) -> None:
        """Take the collaborators.

        Args:
            table: All reservations.
            blocks: Where blocks go back to.
            memory: Knows whether a writer is dead.
            revoke_timeout_s: Longest wait for one answer of a writer.
            reap_interval_s: Pause between two questions about a quarantined ticket.
            on_quarantine: Called after each change of the number of quarantined blocks.
        """
        self._table = table
        self._blocks = blocks
        self._memory = memory
        self._revoke_timeout_s = revoke_timeout_s
        self._reap_interval_s = reap_interval_s
        self._on_quarantine = on_quarantine
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of tickets that are being ended."""
        return len(self._tasks)

    def revoke(self, revocation: Revocation) -> None:
        """Take no more receipts from now on, and give the blocks back as soon as that is safe."""
        self._table.begin_revoke(revocation.ticket.id)
        self._spawn(self._end(revocation))

    def finish(self, stream: HandoffStream) -> None:
        """Close the stream of a committed hand-off, after a moment for its orderly end."""
        self._spawn(self._close(stream))

    async def stop(self, timeout_s: float) -> bool:
        """Wait until every ticket has ended. Returns False, and gives up, if one has not."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return not left

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("ending a ticket failed; its blocks stay taken", exc_info=error)

    async def _end(self, revocation: Revocation) -> None:
        ticket = revocation.ticket
        logger.info("revoking cause=%s ticket_id=%s", revocation.cause, ticket.id.hex())
        try:
            is_quiet = await self._ask_on_stream(revocation) or await self._probe(revocation)
        finally:
            revocation.stream.close()
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

    def _give_back(self, ticket: Ticket) -> None:
        released = self._table.drained(ticket.id)
        assert released is not None  # this task alone ends the ticket
        if released.was_quarantined:
            self._blocks.release_quarantine(released.block_ids)
            self._on_quarantine()
        else:
            self._blocks.give_back(released.block_ids)
        logger.info("drained ticket_id=%s", ticket.id.hex())

    async def _ask_on_stream(self, revocation: Revocation) -> bool:
        stream = revocation.stream
        if stream.end is not StreamEnd.OPEN:
            return stream.end is StreamEnd.QUIET
        try:
            async with asyncio.timeout(self._revoke_timeout_s):
                return await stream.revoke(revocation.ticket.id, revocation.cause)
        except TimeoutError:
            return False

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

    async def _close(self, stream: HandoffStream) -> None:
        try:
            async with asyncio.timeout(self._revoke_timeout_s):
                await stream.wait_end()
        except TimeoutError:
            logger.info("prefill has not closed the stream of a finished hand-off")
        finally:
            stream.close()
