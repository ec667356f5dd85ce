"""The end of a Prefill call as its two users see it: the request, and the revoker after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from decode_service.handoff_stream import HandoffStream, StreamEnd
from serving_core.errors import PrefillUnavailableError
from tandem.v1 import prefill_service_pb2 as pb
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

# More than a transport takes at once, so that the write is still going on when it is cancelled.
MANY_BYTES = b"x" * 50_000_000


class DeafPrefill(pb_grpc.PrefillServiceServicer):
    """Says nothing and reads nothing."""

    async def Prefill(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Wait for the end."""
        await asyncio.Event().wait()


@asynccontextmanager
async def deaf_stream() -> AsyncIterator[HandoffStream]:
    """A stream whose peer does nothing."""
    server = grpc.aio.server()
    pb_grpc.add_PrefillServiceServicer_to_server(DeafPrefill(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.PrefillServiceStub(channel).Prefill()
        stream = HandoffStream(call, write_timeout_s=30.0, silence_timeout_s=30.0)
        await stream.send(pb.PrefillRequest(renew=pb.Renew(ticket_id=b"1")))
        yield stream
        stream.close()
    await server.stop(0)


async def test_cancelled_write_breaks_the_stream_and_cancels_nobody_else() -> None:
    """The revoker asks on this stream next; if it were cancelled, its blocks would be lost."""
    async with deaf_stream() as stream:
        reading = asyncio.create_task(stream.next_message())
        request = pb.PrefillRequest(revoke=pb.Revoke(ticket_id=b"1", cause=MANY_BYTES.decode()))
        writing = asyncio.create_task(stream.send(request))
        await asyncio.sleep(0.05)  # the write is under way, and stays so
        assert not writing.done()
        writing.cancel()
        with pytest.raises(PrefillUnavailableError, match="on our side"):
            await reading
        assert await stream.revoke(b"1", "test") is False
        assert stream.end is StreamEnd.BROKEN


async def test_reader_that_is_cancelled_itself_says_so_and_loses_no_message() -> None:
    async with deaf_stream() as stream:
        reading = asyncio.create_task(stream.next_message())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert stream.end is StreamEnd.OPEN
