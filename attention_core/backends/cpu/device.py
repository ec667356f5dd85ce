"""Events and captured steps on a CPU, where work is complete when its call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CpuEvent:
    """An event that is complete once recorded: operators here return when they are done.

    States: unrecorded -> complete. Thread-safe.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_complete = False

    def record(self) -> None:
        """Complete the event and wake every waiter; recording again changes nothing."""
        with self._condition:
            self._is_complete = True
            self._condition.notify_all()

    def query(self) -> bool:
        """Whether the event was recorded."""
        with self._condition:
            return self._is_complete

    def synchronize(self, timeout_s: float) -> bool:
        """Wait until the event is recorded, for timeout_s seconds at most."""
        with self._condition:
            return self._condition.wait_for(lambda: self._is_complete, max(timeout_s, 0.0))


class CpuGraph:
    """A captured step: the closure over its buffers, run as it was frozen."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn

    def replay(self) -> None:
        """Run the step on what its buffers hold now."""
        self._fn()


class CpuDevice:
    """The CPU of this process."""

    @property
    def name(self) -> str:
        """ "cpu"."""
        return "cpu"

    def new_event(self) -> CpuEvent:
        """A fresh, unrecorded event."""
        return CpuEvent()

    def capture(self, fn: Callable[[], None]) -> CpuGraph:
        """Run the step once, so that its errors show now, and freeze it."""
        fn()
        return CpuGraph(fn)
