"""Blocks for those in line: order, cancels, bounds."""

from __future__ import annotations

import asyncio

import pytest

from decode_service.block_queue import BlockQueue
from serving_core.block_pool import BlockPool
from serving_core.errors import OverloadedError


async def settle() -> None:
    """Let ready tasks run."""
    for _ in range(3):
        await asyncio.sleep(0)


def make_queue(num_blocks: int = 4, max_waiting: int = 8) -> tuple[BlockPool, BlockQueue]:
    """A pool and its queue."""
    pool = BlockPool(num_blocks)
    return pool, BlockQueue(pool, max_waiting=max_waiting, retry_after_s=0.5)


async def test_take_with_free_blocks_returns_them_at_once() -> None:
    pool, queue = make_queue()
    assert len(await queue.take(3)) == 3
    assert pool.num_free == 1


async def test_take_large_head_is_not_overtaken_by_a_small_one() -> None:
    pool, queue = make_queue()
    held = await queue.take(2)
    large = asyncio.create_task(queue.take(4))
    small = asyncio.create_task(queue.take(1))
    await settle()
    assert not small.done()
    queue.give_back(held)
    await settle()
    assert large.done()
    assert not small.done()
    queue.give_back(large.result())
    queue.give_back(await small)
    assert pool.num_free == 4
    pool.check_integrity()


async def test_take_cancelled_head_lets_the_next_one_through() -> None:
    pool, queue = make_queue()
    held = await queue.take(2)
    head = asyncio.create_task(queue.take(4))
    await settle()
    behind = asyncio.create_task(queue.take(2))
    await settle()
    head.cancel()
    assert len(await behind) == 2
    assert queue.num_waiting == 0
    queue.give_back(behind.result())
    queue.give_back(held)
    assert pool.num_free == 4


async def test_take_cancelled_just_after_being_served_gives_the_blocks_back() -> None:
    pool, queue = make_queue()
    held = await queue.take(4)
    waiting = asyncio.create_task(queue.take(4))
    await settle()
    queue.give_back(held)  # serves the waiter, whose task has not run yet
    assert pool.num_free == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_free == 4
    pool.check_integrity()


async def test_take_cancelled_and_served_in_one_turn_loses_nothing() -> None:
    pool, queue = make_queue()
    held = await queue.take(4)
    waiting = asyncio.create_task(queue.take(4))
    await settle()
    waiting.cancel()
    queue.give_back(held)  # the cancelled waiter is still in line
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_free == 4
    assert len(await queue.take(4)) == 4


async def test_take_full_line_refuses_with_retry_delay() -> None:
    _, queue = make_queue(num_blocks=1, max_waiting=1)
    await queue.take(1)
    waiting = asyncio.create_task(queue.take(1))
    await settle()
    with pytest.raises(OverloadedError, match="limit is 1") as caught:
        await queue.take(1)
    assert caught.value.retry_after_s == 0.5
    waiting.cancel()


async def test_quarantined_blocks_come_back_to_the_line() -> None:
    pool, queue = make_queue(num_blocks=2)
    held = await queue.take(2)
    queue.quarantine(held)
    waiting = asyncio.create_task(queue.take(1))
    await settle()
    assert not waiting.done()
    queue.release_quarantine(held)
    assert len(await waiting) == 1
    assert pool.num_quarantined == 0
