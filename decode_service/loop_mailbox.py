"""Carries results from the compute thread to the event loop; one wake-up for all that wait."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class LoopMailbox(Generic[T]):
    """Keeps order. Its size is bounded by what the senders may have outstanding."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_items: Callable[[Sequence[T]], None]
    ) -> None:
        """Deliver to `on_items` on the loop's thread."""
        self._loop = loop
        self._on_items = on_items
        self._lock = threading.Lock()
        self._items: list[T] = []

    def post(self, items: Sequence[T]) -> None:
        """Send items; any thread, never blocks. Too late for a closed loop raises RuntimeError."""
        if not items:
            return
        with self._lock:
            is_waking = bool(self._items)
            self._items.extend(items)
        if not is_waking:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        self._on_items(items)
