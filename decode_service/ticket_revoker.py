"""Ends tickets after a fault: asks the writer, then lets the landing take the memory back.

Event loop thread only.
"""

import asyncio
import logging

from decode_service.handoff_stream import HandoffStream, StreamEnd
from decode_service.landing import Landing, Revocation

logger = logging.getLogger(__name__)


class TicketRevoker:
    """All tickets that are being ended; each by a task of its own that no client can cancel."""

    def __init__(self, *, revoke_timeout_s: float) -> None:
        """Set the longest wait for one answer of a writer."""
        self._revoke_timeout_s = revoke_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of tickets that are being ended."""
        return len(self._tasks)

    def revoke(self, revocation: Revocation, landing: Landing) -> None:
        """Take no more receipts from now on, and take the memory back as soon as that is safe.

        No receipt of the ticket may be landing.
        """
        landing.begin_revoke(revocation.ticket)
        self._spawn(self._end(revocation, landing))

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

    async def _end(self, revocation: Revocation, landing: Landing) -> None:
        ticket_id = revocation.ticket.id.hex()
        logger.info("revoking cause=%s ticket_id=%s", revocation.cause, ticket_id)
        try:
            is_quiet = await self._ask_on_stream(revocation)
        finally:
            revocation.stream.close()
        await landing.reclaim(revocation, is_quiet=is_quiet)

    async def _ask_on_stream(self, revocation: Revocation) -> bool:
        stream = revocation.stream
        if stream.end is not StreamEnd.OPEN:
            return stream.end is StreamEnd.QUIET
        try:
            async with asyncio.timeout(self._revoke_timeout_s):
                return await stream.revoke(revocation.ticket.id, revocation.cause)
        except TimeoutError:
            return False

    async def _close(self, stream: HandoffStream) -> None:
        try:
            async with asyncio.timeout(self._revoke_timeout_s):
                await stream.finish()
        except TimeoutError:
            logger.info("prefill has not closed the stream of a finished hand-off")
        finally:
            stream.close()
