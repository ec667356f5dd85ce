"""One Prefill call: messages out one at a time, messages in without losing any to a cancelled wait.

    open -> (failed | drained | ended well | broken)

Event loop thread only; one reader at a time.
"""

import asyncio
from enum import Enum

import grpc

from decode_service.prefill_errors import PrefillSilentError, error_from_failure, error_from_rpc
from serving_core.errors import PrefillUnavailableError, TandemError
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb

# Prefill sends a heartbeat twice a second.
DEFAULT_SILENCE_S = 3.0


class StreamEnd(Enum):
    """What the way a stream ended says about writes of its ticket."""

    OPEN = "open"
    QUIET = "quiet"  # prefill said so: Failed, Drained, or OK after its last receipt
    BROKEN = "broken"  # nobody said anything, or that it cannot be known


class HandoffStream:
    """A Prefill call and what is known of its end."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillResponse]",
        *,
        write_timeout_s: float,
        silence_timeout_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        """Take an opened call.

        Args:
            call: The call; this object ends it.
            write_timeout_s: Longest time until the peer takes one message.
            silence_timeout_s: Longest time without any message, heartbeats included.
        """
        self._call = call
        self._silence_timeout_s = silence_timeout_s
        self._write_timeout_s = write_timeout_s
        self._write_lock = asyncio.Lock()
        self._reading: asyncio.Task[pb.PrefillResponse | None] | None = None
        self._end = StreamEnd.OPEN

    @property
    def end(self) -> StreamEnd:
        """How the stream ended, as far as it was read."""
        return self._end

    async def send(self, request: pb.PrefillRequest) -> bool:
        """Send one message. Returns False when the stream has ended: its reader learns why.

        Raises:
            PrefillUnavailableError: The peer does not take the message in time.
        """
        try:
            async with asyncio.timeout(self._write_timeout_s), self._write_lock:
                await self._call.write(request)
        except TimeoutError as error:
            raise PrefillUnavailableError(
                f"prefill took no message for {self._write_timeout_s:g} s"
            ) from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def next_message(self) -> pb.PrefillResponse | None:
        """Wait for a message; None when the stream ended with OK. The caller bounds the wait.

        A wait that is cancelled takes no message: the next call gets it.

        Raises:
            TandemError: Prefill failed the hand-off, or the stream broke.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieve)
        message = await asyncio.shield(self._reading)
        self._reading = None
        if message is None:
            self._end = StreamEnd.QUIET
        elif message.HasField("failed"):
            failure = message.failed.failure
            is_broken = failure.reason == errors_pb2.FAILURE_REASON_LINK_BROKEN
            self._end = StreamEnd.BROKEN if is_broken else StreamEnd.QUIET
            raise error_from_failure(failure)
        elif message.HasField("drained"):
            self._end = StreamEnd.QUIET
        return message

    async def revoke(self, ticket_id: bytes, cause: str) -> bool:
        """Ask prefill to end the ticket and wait for its word. The caller bounds the wait.

        Returns:
            Whether no write of the ticket can happen any more.
        """
        try:
            if self._end is StreamEnd.OPEN:
                revoke = pb.Revoke(ticket_id=ticket_id, cause=cause)
                await self.send(pb.PrefillRequest(revoke=revoke))
            while self._end is StreamEnd.OPEN:
                await self.next_message()
        except TandemError:
            # A Failed message is an answer as good as Drained; anything else broke the stream.
            return self._end is StreamEnd.QUIET
        return self._end is StreamEnd.QUIET

    async def finish(self) -> None:
        """Close our side, and read until the stream has ended, however it ends.

        The caller bounds the wait.
        """
        try:
            async with self._write_lock:
                await self._call.done_writing()
            while self._end is StreamEnd.OPEN:
                await self.next_message()
        except (TandemError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # After the commit nothing depends on the stream any more; `end` tells how it was.
            return

    def close(self) -> None:
        """End the call, whatever its state."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> pb.PrefillResponse | None:
        """Read the next message that is no heartbeat."""
        try:
            while True:
                # A stopped process keeps its connection, so only its silence tells. Giving up on
                # a read ends the call, which is what a silent peer deserves.
                async with asyncio.timeout(self._silence_timeout_s):
                    message = await self._call.read()  # raises when the call ended badly
                if not isinstance(message, pb.PrefillResponse):
                    return None
                if not message.HasField("heartbeat"):
                    return message
        except TimeoutError as error:
            self._end = StreamEnd.BROKEN
            raise PrefillSilentError(
                f"prefill has sent nothing for {self._silence_timeout_s:g} s"
            ) from error
        except grpc.aio.AioRpcError as error:
            self._end = StreamEnd.BROKEN
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            # A write that is cancelled ends the whole call, and a reader is then told that it was
            # cancelled itself. Whoever waits here must not die of that: it may hold blocks.
            if _is_cancelled_itself():
                raise
            self._end = StreamEnd.BROKEN
            raise PrefillUnavailableError("the call was cancelled on our side") from None


def _is_cancelled_itself() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _retrieve(reading: "asyncio.Task[pb.PrefillResponse | None]") -> None:
    """Look at an error that nobody waits for any more, so that asyncio does not report it."""
    if not reading.cancelled():
        reading.exception()
