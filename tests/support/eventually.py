"""Waiting for conditions that other tasks of the same loop bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(
    condition: Callable[[], bool], *, timeout_s: float = 5.0, pause_s: float = 0.0
) -> None:
    """Lets tasks run until the condition holds.

    Raises:
        TimeoutError: it did not hold within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the code under test has no event to offer
            await asyncio.sleep(pause_s)
