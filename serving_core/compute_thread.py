"""The thread that owns a service's running batch and its model.

    new -> running -> stopped
              |
              +-----> failed: told once by `on_fatal`

Commands come in by a bounded queue and are obeyed between two steps. When the worker is idle the
thread waits for a command and takes no time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)


class Worker(Protocol[CommandT_contra]):
    """What the thread runs; all methods are called on it, one at a time."""

    def is_idle(self) -> bool:
        """Whether there is nothing to compute before the next command."""

    def obey(self, command: CommandT_contra) -> None:
        """Take a command."""

    def step(self) -> None:
        """Run one step, if there is one. An error that it raises ends the thread."""


class _Stop:
    pass


class ComputeThread(Generic[CommandT]):
    """Runs a worker. `start`, `post` and `stop` may be called from other threads."""

    def __init__(
        self,
        *,
        name: str,
        worker: Worker[CommandT],
        max_commands: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Take the worker; nothing runs before `start`.

        Args:
            name: Of the thread, for debuggers.
            worker: What runs.
            max_commands: Most commands that can wait, by the owner's own guarantee.
            on_fatal: Called on the thread when it ends on an error.
        """
        self._worker = worker
        self._on_fatal = on_fatal
        self._commands: queue.Queue[CommandT | _Stop] = queue.Queue(maxsize=max_commands + 1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: CommandT) -> None:
        """Hand a command over; it is obeyed before the next step. Never blocks."""
        self._commands.put_nowait(command)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its running step; blocks. Returns False if it did not end."""
        if self._thread.is_alive():
            self._commands.put(_Stop(), timeout=timeout_s)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._obey_commands():
                    self._worker.step()
        except BaseException as error:  # the thread is the boundary: the owner ends the process
            self._on_fatal(error)

    def _obey_commands(self) -> bool:
        """Obey all waiting commands, waiting for one when idle. False means stop."""
        block = self._worker.is_idle()
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, _Stop):
                return False
            self._worker.obey(command)
