"""The engine between processes of one machine: the target is memory that both map.

The memory is a sealed memfd, so it can neither shrink under a writer nor be swapped for another.
Its descriptor is passed over a Unix socket that only this user can reach, to writers that know the
access key. A writer copies straight into it. Its end is proven by a pidfd.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kv_transfer.digest import NewDigest, new_xxh3
from kv_transfer.engine import shm_sockets
from kv_transfer.engine.base import CopySpan, TargetDescriptor, WriterState
from kv_transfer.engine.door import Door, DoorLimits
from kv_transfer.engine.door_protocol import (
    ACCESS_KEY_BYTES,
    ANSWER_BYTES,
    Answer,
    decode_answer,
    encode_hello,
)
from kv_transfer.engine.gate import CloseGate
from kv_transfer.engine.host_copy import HostCopier
from kv_transfer.engine.peer_process import PeerProcess, is_hung_up
from kv_transfer.engine.sealed_memory import SIZE_SEALS, check_available, sealed_memory
from kv_transfer.engine.shm_door import ShmDoorkeeper
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerRefusedError,
    TargetAllocationError,
    WriteFaultError,
    WriteStoppedError,
)

logger = logging.getLogger(__name__)

_BACKLOG = 64
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds


class ShmTarget:
    """Memory of this process that writers of other processes map."""

    def __init__(self, socket_dir: Path, num_bytes: int, limits: DoorLimits) -> None:
        """Allocate and seal the memory, and open the door.

        Raises:
            TargetAllocationError: The memory or the socket cannot be had.
        """
        self._owner_pid = os.getpid()
        self._is_closed = False
        access_key = secrets.token_bytes(ACCESS_KEY_BYTES)
        try:
            with contextlib.ExitStack() as undo:
                self._fd = sealed_memory(num_bytes)
                undo.callback(os.close, self._fd)
                self._mapping = mmap.mmap(self._fd, num_bytes)
                listener, self._path = shm_sockets.listen(
                    socket_dir, secrets.token_hex(16), _BACKLOG
                )
                undo.callback(listener.close)
                undo.callback(self._path.unlink)
                keeper = ShmDoorkeeper(self._fd, num_bytes, limits)
                self._register = keeper.register
                self._door = Door(
                    listener=listener,
                    access_key=access_key,
                    size_bytes=num_bytes,
                    limits=limits,
                    keeper=keeper,
                )
                undo.pop_all()
        except (OSError, OverflowError) as error:
            raise TargetAllocationError(f"{num_bytes} bytes of memory: {error}") from error
        self.buffer = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.descriptor = TargetDescriptor(
            engine=ShmEngine.name,
            address=os.fspath(self._path),
            access_key=access_key,
            size_bytes=num_bytes,
        )

    def writer_state(self, prefill_incarnation: str) -> WriterState:
        """As the protocol says; after `close` every writer is UNKNOWN."""
        return self._register.state(prefill_incarnation)

    def close(self) -> None:
        """As the protocol says. A forked child leaves the target to its parent."""
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        self._path.unlink(missing_ok=True)
        self._door.close()
        os.close(self._fd)
        # Never unmapped by hand: tensors may still look at the memory, and torch keeps a reference
        # to the view that it was given but no export of it, so `release` would not refuse. The
        # mapping goes with the last reference.
        self.buffer = memoryview(b"")
        del self._mapping


class ShmLink:
    """Writes into the mapped memory of another process."""

    def __init__(
        self,
        connection: socket.socket,
        process: PeerProcess,
        mapping: mmap.mmap,
        new_digest: NewDigest,
    ) -> None:
        """Own the first three."""
        self._owner_pid = os.getpid()
        self._connection = connection
        self._process = process
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._copier = HostCopier(self._view, new_digest)
        self._gate = CloseGate()
        self._has_died = False

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """As the protocol says."""
        if os.getpid() != self._owner_pid:
            # Its owner's end is the proof that nothing is written any more.
            raise WriteFaultError("the link belongs to the parent of this process")
        with self._gate.entered():
            return self._copier.copy(
                copies, lambda: self._gate.is_closing or should_stop(), self._look
            )

    def peer_is_dead(self) -> bool:
        """As the protocol says; after `close`, what was known last."""
        try:
            with self._gate.entered():
                return self._look()
        except WriteStoppedError:
            return self._has_died

    def proves_quiet(self) -> bool:
        """As the protocol says: a copy that has ended has ended."""
        return True

    def close(self) -> None:
        """As the protocol says. A forked child leaves the link to its parent."""
        if os.getpid() == self._owner_pid and self._gate.close():
            self._view.release()
            self._mapping.close()
            # Unmapped first: who sees the connection end may take the writer for gone.
            self._connection.close()
            self._process.close()

    def _look(self) -> bool:
        if not self._has_died:
            self._has_died = is_hung_up(self._connection) or self._process.is_dead()
        return self._has_died


class ShmEngine:
    """Targets and links over shared memory."""

    name = "shm"
    can_fence_writer = True

    def __init__(
        self,
        socket_dir: Path,
        limits: DoorLimits | None = None,
        new_digest: NewDigest = new_xxh3,
    ) -> None:
        """Use a directory for the sockets; both sides must be given the same one.

        Args:
            socket_dir: Made if its parent is there; must be this user's, mode 0700.
            limits: Bounds of each target's door; None takes the defaults.
            new_digest: What writes digest with.

        Raises:
            EngineConfigError: The directory is unfit.
        """
        self._socket_dir = shm_sockets.check_socket_dir(socket_dir)
        self._limits = limits if limits is not None else DoorLimits()
        self._new_digest = new_digest

    def create_target(self, num_bytes: int) -> ShmTarget:
        """As the protocol says."""
        if num_bytes <= 0:
            raise EngineConfigError("num_bytes", num_bytes, ">= 1")
        check_available(num_bytes)
        shm_sockets.remove_stale_sockets(self._socket_dir)
        return ShmTarget(self._socket_dir, num_bytes, self._limits)

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> ShmLink:
        """As the protocol says."""
        if descriptor.engine != self.name:
            raise EngineConfigError("descriptor.engine", descriptor.engine, self.name)
        hello = encode_hello(descriptor.access_key, prefill_incarnation)
        path = shm_sockets.check_socket_path(descriptor.address, self._socket_dir)
        deadline_s = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            _connect(connection, path, timeout_s)
            process = PeerProcess.of_socket(connection)
            undo.callback(process.close)
            if process.uid != os.geteuid():
                raise PeerRefusedError(f"the target belongs to user {process.uid}")
            fd = _ask_for_memory(connection, hello, descriptor.size_bytes, deadline_s)
            try:
                mapping = _map_sealed(fd, descriptor.size_bytes)
            finally:
                os.close(fd)
            undo.pop_all()
        return ShmLink(connection, process, mapping, self._new_digest)


def _connect(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect within the timeout.

    The socket blocks with a kernel timeout, because a non-blocking one fails at once when the
    backlog is full.
    """
    seconds, fraction = divmod(max(timeout_s, 1e-3), 1.0)
    timeout = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    try:
        connection.connect(os.fspath(path))
    except BlockingIOError as error:
        raise ConnectError(f"{path} took no connection within {timeout_s} s") from error
    except OSError as error:
        raise ConnectError(f"{path}: {error}") from error


def _ask_for_memory(
    connection: socket.socket, hello: bytes, size_bytes: int, deadline_s: float
) -> int:
    """Say hello and return the descriptor of the target's memory.

    Raises:
        ConnectError: No answer in time, or the target is busy.
        PeerRefusedError: The target refuses, or is not what the descriptor says.
    """
    with contextlib.ExitStack() as received:
        raw = b""
        fds: list[int] = []
        try:
            connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
            connection.sendall(hello)
            while len(raw) < ANSWER_BYTES:
                connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
                part, new_fds, _, _ = socket.recv_fds(
                    connection,
                    ANSWER_BYTES - len(raw),
                    1,
                    socket.MSG_CMSG_CLOEXEC,
                )
                for fd in new_fds:
                    received.callback(os.close, fd)
                fds += new_fds
                if not part:
                    raise PeerRefusedError("the target refused the access key")
                raw += part
        except TimeoutError as error:
            raise ConnectError("the target did not answer in time") from error
        except OSError as error:
            raise PeerRefusedError(f"the target hung up: {error}") from error
        answer, target_bytes = decode_answer(raw)
        if answer is Answer.BUSY:
            raise ConnectError("the target has too many writers")
        if answer is not Answer.ACCEPTED:
            raise PeerRefusedError(f"the target answered {answer.name}")
        if target_bytes != size_bytes:
            raise PeerRefusedError(
                f"the target has {target_bytes} bytes, the descriptor says {size_bytes}"
            )
        if len(fds) != 1:
            raise PeerRefusedError(f"the target passed {len(fds)} descriptors instead of one")
        received.pop_all()
        return fds[0]


def _map_sealed(fd: int, size_bytes: int) -> mmap.mmap:
    """Map memory that a peer passed, if it cannot shrink under this process.

    Raises:
        PeerRefusedError: It is no sealed memory of the expected size.
        ConnectError: It cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PeerRefusedError(f"the target passed no memory: {error}") from error
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise PeerRefusedError(f"the target's memory has seals {seals:#x}, not its size sealed")
    if os.fstat(fd).st_size != size_bytes:
        raise PeerRefusedError(f"the target's memory has {os.fstat(fd).st_size} bytes")
    try:
        return mmap.mmap(fd, size_bytes)
    except OSError as error:
        raise ConnectError(f"{size_bytes} bytes cannot be mapped: {error}") from error
