"""Lets a resource be closed only when nobody is inside, and nobody in once it closes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.errors import WriteStoppedError


class CloseGate:
    """Counts who is inside.

    open ──close begins──▶ closing (those inside see `is_closing`) ──all left──▶ closed
    """

    def __init__(self) -> None:
        """Start open."""
        self._left = threading.Condition()
        self._num_inside = 0
        self.is_closing = False  # read without the lock by those inside

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for the time of the block.

        Raises:
            WriteStoppedError: The gate is closing or closed.
        """
        with self._left:
            if self.is_closing:
                raise WriteStoppedError("the link is closed")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._left:
                self._num_inside -= 1
                self._left.notify_all()

    def close(self) -> bool:
        """Close and wait until all have left; they do so at their next check.

        Returns:
            Whether this call is the one that closed it; only that one disposes of the resource.
        """
        with self._left:
            is_first = not self.is_closing
            self.is_closing = True
            self._left.wait_for(lambda: self._num_inside == 0)
        return is_first
