"""The messages of one Prefill stream on their way from the event loop's handlers to its writer.

Receipts that wait together leave together as one Progress message. An outbox ends in one of two
ways: `close` lets the writer send what is there and then end the stream with OK; `fail` makes the
writer raise. The first of them counts. Owned by the event loop thread.
"""

import asyncio
from collections import deque

from tandem.v1 import handoff_pb2
from tandem.v1 import prefill_service_pb2 as pb

# One Progress message stays far below gRPC's 4 MiB limit: a receipt takes about 100 bytes.
MAX_RECEIPTS_PER_MESSAGE = 1024


class Outbox:
    """A bounded queue of messages with one reader."""

    def __init__(self, *, capacity: int) -> None:
        """Make an empty outbox.

        Args:
            capacity: Most messages and receipts that may wait. The messages that end a stream
                are accepted beyond it.
        """
        self._capacity = capacity
        self._items: deque[pb.PrefillResponse | handoff_pb2.Receipt] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return how many messages and receipts wait."""
        return len(self._items)

    def put(self, message: pb.PrefillResponse) -> None:
        """Queue a message; after the end it is dropped, as nobody reads it."""
        self._append(message)

    def put_receipt(self, receipt: handoff_pb2.Receipt) -> bool:
        """Queue a receipt. Returns False when the peer lets too many pile up."""
        if len(self._items) >= self._capacity:
            return False
        self._append(receipt)
        return True

    def close(self) -> None:
        """Let the stream end with OK after what is queued. Idempotent."""
        self._closed = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Make the reader raise `error` at once, unless the outbox has ended before."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._items.clear()
            self._changed.set()

    async def next_message(self) -> pb.PrefillResponse | None:
        """Wait for the next message; None at the end of the stream.

        The wait is bounded by the owner, which ends every outbox by a deadline of its job.

        Raises:
            Exception: The error given to `fail`.
        """
        while not self._items and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, pb.PrefillResponse):
            return item
        progress = pb.Progress(receipts=[item])
        while self._items and len(progress.receipts) < MAX_RECEIPTS_PER_MESSAGE:
            following = self._items[0]
            if isinstance(following, pb.PrefillResponse):
                break
            progress.receipts.append(following)
            self._items.popleft()
        return pb.PrefillResponse(progress=progress)

    def _append(self, item: pb.PrefillResponse | handoff_pb2.Receipt) -> None:
        if not self._closed:
            self._items.append(item)
            self._changed.set()
