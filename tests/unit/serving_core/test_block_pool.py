"""The block pool: all or none, no double free, quarantine, and a model-based test."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving_core.block_pool import BlockPool
from serving_core.errors import PoolExhaustedError

NUM_BLOCKS = 9


def test_allocate_more_than_free_takes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="2 blocks wanted, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.free(held)
    assert pool.num_free == pool.num_total == 3


@pytest.mark.parametrize("block_ids", [(0, 0), (0, 7), (-1,), (1,)])
def test_free_of_blocks_not_in_use_is_refused_and_changes_nothing(
    block_ids: tuple[int, ...],
) -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    assert held == (0,)
    with pytest.raises(ValueError, match="block"):
        pool.free(block_ids)
    assert pool.num_free == 2
    pool.check_integrity()
    pool.free(held)


def test_quarantined_blocks_are_neither_free_nor_freeable() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    pool.quarantine(held)
    assert (pool.num_free, pool.num_quarantined) == (1, 3)
    with pytest.raises(ValueError, match="is quarantined, not in use"):
        pool.free(held)
    with pytest.raises(ValueError, match="is free, not quarantined"):
        pool.release_quarantine([3])
    pool.release_quarantine(held)
    assert (pool.num_free, pool.num_quarantined) == (4, 0)


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks = 0"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside two plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.used: list[tuple[int, ...]] = []
        self.quarantined: list[tuple[int, ...]] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        """Disjoint from everything that is held."""
        try:
            block_ids = self.pool.allocate(num_blocks)
        except PoolExhaustedError:
            assert num_blocks > self.pool.num_free
            return
        held = {block for group in self.used + self.quarantined for block in group}
        assert len(set(block_ids)) == num_blocks
        assert not held & set(block_ids)
        self.used.append(block_ids)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Give a group back."""
        self.pool.free(self.used.pop(data.draw(st.integers(0, len(self.used) - 1))))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """Put a group aside."""
        group = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.pool.quarantine(group)
        self.quarantined.append(group)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Let a group go."""
        index = data.draw(st.integers(0, len(self.quarantined) - 1))
        self.pool.release_quarantine(self.quarantined.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        """The pool and the model count the same."""
        self.pool.check_integrity()
        assert self.pool.num_quarantined == sum(map(len, self.quarantined))
        held = sum(map(len, self.used + self.quarantined))
        assert self.pool.num_free == NUM_BLOCKS - held


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
