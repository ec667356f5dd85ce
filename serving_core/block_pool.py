"""Which KV blocks are free, in use, or quarantined.

    free -> in use -> free
    in use -> quarantined -> free

A quarantined block belongs to nobody, but a remote writer may still reach it: it must not be given
out before that writer is proven quiet. The pool is used by the event loop's thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from serving_core.errors import PoolExhaustedError


class _State(Enum):
    FREE = "free"
    IN_USE = "in use"
    QUARANTINED = "quarantined"


class BlockPool:
    """Hands out block ids; every operation costs time linear in the blocks it moves.

    Blocks are reused in the order in which they came back, so a stale pointer to a freed block
    has the longest possible time to show up in tests.

    Args:
        num_blocks: Size of the pool; ids are 0 to num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: must be at least 1")
        self._free: deque[int] = deque(range(num_blocks))
        self._states = [_State.FREE] * num_blocks
        self._num_quarantined = 0

    @property
    def num_total(self) -> int:
        """Size of the pool, in blocks."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Blocks that anybody may take."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a reference; zero as long as there is no prefix cache."""
        return 0

    @property
    def num_quarantined(self) -> int:
        """Blocks that a remote writer may still reach."""
        return self._num_quarantined

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take `num_blocks` free blocks, all or none.

        Raises:
            PoolExhaustedError: Fewer are free.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks = {num_blocks}: must be at least 0")
        if num_blocks > len(self._free):
            raise PoolExhaustedError(num_blocks, len(self._free))
        block_ids = tuple(self._free.popleft() for _ in range(num_blocks))
        for block_id in block_ids:
            self._states[block_id] = _State.IN_USE
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks in use back.

        Raises:
            ValueError: One is not in use, or is listed twice; nothing is changed then.
        """
        self._move(block_ids, _State.IN_USE, _State.FREE)
        self._free.extend(block_ids)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Keep blocks in use from being given out until `release_quarantine`.

        Raises:
            ValueError: One is not in use, or is listed twice; nothing is changed then.
        """
        self._move(block_ids, _State.IN_USE, _State.QUARANTINED)
        self._num_quarantined += len(block_ids)

    def release_quarantine(self, block_ids: Sequence[int]) -> None:
        """Give quarantined blocks back, once their writer is proven quiet.

        Raises:
            ValueError: One is not quarantined, or is listed twice; nothing is changed then.
        """
        self._move(block_ids, _State.QUARANTINED, _State.FREE)
        self._num_quarantined -= len(block_ids)
        self._free.extend(block_ids)

    def _move(self, block_ids: Sequence[int], expected: _State, new: _State) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block is listed twice")
        for block_id in block_ids:
            if not 0 <= block_id < len(self._states):
                raise ValueError(f"block {block_id}: not in [0, {len(self._states) - 1}]")
            if self._states[block_id] is not expected:
                raise ValueError(
                    f"block {block_id} is {self._states[block_id].value}, not {expected.value}"
                )
        for block_id in block_ids:
            self._states[block_id] = new

    def check_integrity(self) -> None:
        """Check that every block is in exactly one state and that the counts agree.

        Raises:
            AssertionError: The pool is damaged, which is a fault of this code.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        listed = {i for i, state in enumerate(self._states) if state is _State.FREE}
        if free != listed:
            raise AssertionError("the free list and the block states disagree")
        quarantined = sum(state is _State.QUARANTINED for state in self._states)
        if quarantined != self._num_quarantined:
            raise AssertionError("the quarantine count and the block states disagree")
