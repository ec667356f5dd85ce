"""The pool's blocks for those that wait in line: first come first served. Event loop thread only.

Only the head of the line may take blocks, so a long request is not starved by short ones.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from serving_core.block_pool import BlockPool
from serving_core.errors import OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiter:
    num_blocks: int
    granted: "asyncio.Future[tuple[int, ...]]"


class BlockQueue:
    """Hands out the blocks of a pool; nobody else takes or frees any."""

    def __init__(self, pool: BlockPool, *, max_waiting: int, retry_after_s: float) -> None:
        """Start with an empty line.

        Args:
            pool: The blocks.
            max_waiting: Most requests in line.
            retry_after_s: What a refused caller is told to wait.
        """
        self._pool = pool
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s
        self._line: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of requests in line."""
        return len(self._line)

    async def take(self, num_blocks: int) -> tuple[int, ...]:
        """Wait for blocks; the caller bounds the wait by its deadline and may cancel it.

        Raises:
            OverloadedError: The line is full.
        """
        if len(self._line) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._line)} requests wait for blocks, the limit is {self._max_waiting}",
                retry_after_s=self._retry_after_s,
            )
        waiter = _Waiter(num_blocks=num_blocks, granted=asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._serve()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks that nobody writes any more."""
        self._pool.free(block_ids)
        self._serve()

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Set taken blocks aside whose writer is not proven quiet."""
        self._pool.quarantine(block_ids)

    def release_quarantine(self, block_ids: Sequence[int]) -> None:
        """Return blocks whose writer has been proven quiet."""
        self._pool.release_quarantine(block_ids)
        self._serve()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Undo a cancelled wait, whether or not it had been served."""
        if not waiter.granted.cancelled():
            self.give_back(waiter.granted.result())
        elif waiter in self._line:
            self._line.remove(waiter)
            self._serve()

    def _serve(self) -> None:
        while self._line:
            head = self._line[0]
            if not head.granted.cancelled():
                if head.num_blocks > self._pool.num_free:
                    return
                head.granted.set_result(self._pool.allocate(head.num_blocks))
            self._line.popleft()
