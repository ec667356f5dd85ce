"""One service process of the launcher: its ready line, its log, its end.

    starting -> ready -> exited
    starting -> exited

Two threads read its pipes; what happens is put into the launcher's queue of events.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

_TAIL_LINES = 30
# A pipe ends with the last process that holds it, so reading to its end is bounded.
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReady:
    """The child printed its ready line."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """The child ended.

    Attributes:
        name: Name of the child.
        returncode: Exit status; negative is the signal that ended it.
    """

    name: str
    returncode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody asked the launcher to stop."""

    cause: str


LauncherEvent = ChildReady | ChildExited | StopRequested


class ChildProcess:
    """A started service process, in a session of its own: Ctrl-C reaches the launcher only.

    Start it from a thread that lives as long as the child may: the kernel kills the child when
    that thread ends.

    Args:
        name: Short name, e.g. "prefill-0"; prefix of its log lines.
        module: Python module to run.
        arguments: Its command line.
        environ: Variables on top of this process's own.
        events: Gets one `ChildReady` at most, and one `ChildExited`.
        log_path: File that its stderr is written to; None keeps only the last lines.
        on_log_line: Called with each line of stderr, from another thread; None does nothing.
    """

    def __init__(
        self,
        *,
        name: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        events: SimpleQueue[LauncherEvent],
        log_path: Path | None,
        on_log_line: Callable[[str, str], None] | None,
    ) -> None:
        self.name = name
        self._events = events
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.guarded_exec", str(os.getpid()), module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environ},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._log_reader = threading.Thread(
            target=self._read_log,
            args=(self._process.stderr, log_path, on_log_line),
            name=f"{name}-log",
            daemon=True,
        )
        self._output_reader = threading.Thread(
            target=self._read_output,
            args=(self._process.stdout,),
            name=f"{name}-output",
            daemon=True,
        )
        self._log_reader.start()
        self._output_reader.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def log_tail(self) -> list[str]:
        """The last lines of its stderr."""
        return list(self._tail)

    def terminate(self) -> None:
        """Asks it to end. Does nothing when it has ended."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; False when it still runs."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it at once and reaps it. Does nothing when it has ended."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Waits until its output was read; after its end only."""
        self._output_reader.join(timeout=_READ_TIMEOUT_S)
        self._log_reader.join(timeout=_READ_TIMEOUT_S)

    def _read_output(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                address = _ready_address(line)
                if address is not None:
                    self._events.put(ChildReady(name=self.name, address=address))
        returncode = self._process.wait()
        # The reason of a failure is at the end of the log.
        self._log_reader.join(timeout=_READ_TIMEOUT_S)
        self._events.put(ChildExited(name=self.name, returncode=returncode))

    def _read_log(
        self,
        stderr: IO[str],
        log_path: Path | None,
        on_log_line: Callable[[str, str], None] | None,
    ) -> None:
        log = log_path.open("w", encoding="utf-8") if log_path is not None else None
        try:
            with stderr:
                for line in stderr:
                    self._tail.append(line.rstrip("\n"))
                    if log is not None:
                        log.write(line)
                        log.flush()
                    if on_log_line is not None:
                        on_log_line(self.name, line.rstrip("\n"))
        finally:
            if log is not None:
                log.close()


def _ready_address(line: str) -> str | None:
    """The address in a service's ready line; None for any other line."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(message, dict) or message.get("event") != "ready":
        return None
    return str(message["address"])
