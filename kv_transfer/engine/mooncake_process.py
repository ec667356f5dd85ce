"""The parent's hold on a process that runs one Mooncake engine.

    starting ──report──▶ serving ──kill, or it died──▶ gone

Once it is gone, nothing reads or writes the memory that was shared with it.
"""

import collections
import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from kv_transfer.engine.mooncake_child import MAX_PACKET_BYTES

logger = logging.getLogger(__name__)

_CHILD = f"{__package__}.mooncake_child"
_NUM_LAST_LINES = 20
_END_TIMEOUT_S = 10.0  # for the kernel to end a killed process


class MooncakeStartError(Exception):
    """The process did not get ready; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOrder:
    """What the process is to be.

    Attributes:
        role: A check that the package can be used, a receiver, or a sender to one session.
        host: Address under which the engine is reached.
        protocol: Transport: tcp, rdma or ascend.
        device: Names of the transport's devices; empty takes all.
        confine: Whether only loopback peers may connect.
        size_bytes: Length of the shared memory.
        session: A sender's target, host:port.
        scratch_address: Where a sender may write at once, at the target.
        scratch_bytes: And how much.
    """

    role: Literal["check", "receiver", "sender"]
    host: str
    protocol: str
    device: str
    confine: bool
    size_bytes: int = 0
    session: str = ""
    scratch_address: int = 0
    scratch_bytes: int = 0


class MooncakeProcess:
    """A running engine. `send` and `receive` are for one thread at a time."""

    def __init__(self, order: MooncakeOrder, memory_fd: int, timeout_s: float) -> None:
        """Start it, and wait until it is ready.

        Args:
            order: What it is to be.
            memory_fd: The shared memory; stays the caller's.
            timeout_s: Longest wait.

        Raises:
            MooncakeStartError: It reported an error, died, or is not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._is_killed = False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(theirs.fileno()), str(memory_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), memory_fd),
            )
        assert self._process.stderr is not None
        self._logging = threading.Thread(
            target=self._log, args=(self._process.stderr,), name="kv-mooncake-log", daemon=True
        )
        self._logging.start()
        try:
            self.report = self._start(order, deadline_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def is_dead(self) -> bool:
        """Tell whether it has ended. Thread-safe."""
        return self._is_killed or self._process.poll() is not None

    def send(self, packet: bytes) -> bool:
        """Hand it a command; False when it has gone."""
        try:
            return self._control.send(packet) == len(packet)
        except OSError:
            return False

    def receive(self, timeout_s: float) -> bytes | None:
        """Return its next reply; empty when it has gone, None when none came in time."""
        poller = select.poll()
        poller.register(self._control.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1e3):
            return None
        try:
            return self._control.recv(MAX_PACKET_BYTES)
        except OSError:
            return b""

    def kill(self) -> None:
        """End it at once; returns when it has ended. Thread-safe and idempotent."""
        with self._lock:
            if self._is_killed:
                return
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(_END_TIMEOUT_S)
            self._is_killed = True
            self._control.close()
            self._logging.join()

    def _start(self, order: MooncakeOrder, deadline_s: float) -> dict[str, Any]:
        if not self.send(json.dumps(asdict(order)).encode()):
            raise MooncakeStartError(self._why("the process ended at once"))
        raw = self.receive(deadline_s - time.monotonic())
        if raw is None:
            raise MooncakeStartError("the engine was not ready in time")
        if not raw:
            raise MooncakeStartError(self._why("the process died"))
        report: dict[str, Any] = json.loads(raw)
        if "error" in report:
            raise MooncakeStartError(self._why(report["error"]))
        return report

    def _why(self, problem: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return "; ".join([problem, *list(self._last_lines)[-2:]])

    def _log(self, stderr: IO[bytes]) -> None:
        """Take what the native library prints; it is noise unless something fails."""
        with stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                logger.debug("mooncake pid=%d %s", self._process.pid, line)


def run_check(host: str, protocol: str, device: str, timeout_s: float) -> None:
    """Start an engine's process once and end it.

    Raises:
        MooncakeStartError: The package cannot be used here.
    """
    order = MooncakeOrder(role="check", host=host, protocol=protocol, device=device, confine=False)
    memory_fd = os.memfd_create("tandem-kv-check", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory_fd, mmap.PAGESIZE)
        MooncakeProcess(order, memory_fd, timeout_s).kill()
    finally:
        os.close(memory_fd)
