"""The thread that lets writers into a shared-memory target.

One thread serves all connections and trusts none of them. Who does not say a whole, right hello in
time is dropped; who comes when all places are taken drops the guest that has waited longest, so
that loiterers cannot keep a writer out. The door records which processes were let in, for the
proof of their death.
"""

import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.engine import shm_protocol
from kv_transfer.engine.base import WriterState
from kv_transfer.engine.peer_process import PeerProcess
from kv_transfer.engine.shm_protocol import Answer, Hello
from kv_transfer.errors import PeerRefusedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """Bounds of one target's door.

    Attributes:
        hello_timeout_s: Longest time from the connection to a whole hello.
        max_guests: Connections that have not said hello yet.
        max_writers: Connections that were let in.
        max_processes: Living processes that were let in; connections may have come and gone.
        max_dead: Dead incarnations that are remembered; a forgotten one is UNKNOWN.
        accept_pause_s: Pause when this process has no descriptor left.
    """

    hello_timeout_s: float = 2.0
    max_guests: int = 32
    max_writers: int = 256
    max_processes: int = 256
    max_dead: int = 4096
    accept_pause_s: float = 0.1


class WriterRegister:
    """Which incarnations were let in, and which of them are proven dead. Thread-safe."""

    def __init__(self, limits: DoorLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._lock = threading.Lock()
        self._living: dict[str, list[PeerProcess]] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()

    def add(self, incarnation: str, process: PeerProcess) -> bool:
        """Record a process, and own it; False, and not owned, when there are too many."""
        with self._lock:
            self._sweep()
            known = self._living.setdefault(incarnation, [])
            same = [other for other in known if other.pid == process.pid and not other.is_dead()]
            # A process of another PID namespace has the id 0 here, as have all the others of it.
            if same and process.pid > 0:
                process.close()  # held already
                return True
            if sum(map(len, self._living.values())) >= self._limits.max_processes:
                if not known:
                    del self._living[incarnation]
                return False
            known.append(process)
            self._dead.pop(incarnation, None)
            return True

    def state(self, incarnation: str) -> WriterState:
        """Say what is known of an incarnation."""
        with self._lock:
            self._sweep_one(incarnation)
            if incarnation in self._living:
                return WriterState.ALIVE
            return WriterState.DEAD if incarnation in self._dead else WriterState.UNKNOWN

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            for processes in self._living.values():
                for process in processes:
                    process.close()
            self._living.clear()
            self._dead.clear()

    def _sweep(self) -> None:
        for incarnation in list(self._living):
            self._sweep_one(incarnation)

    def _sweep_one(self, incarnation: str) -> None:
        """Call an incarnation dead when all its processes are."""
        processes = self._living.get(incarnation)
        if processes is None or not all(process.is_dead() for process in processes):
            return
        for process in processes:
            process.close()
        del self._living[incarnation]
        self._dead[incarnation] = None
        while len(self._dead) > self._limits.max_dead:
            self._dead.popitem(last=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """A connection that has not said its whole hello."""

    connection: socket.socket
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)


class Door:
    """Serves the listening socket of one target on a thread of its own."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        access_key: bytes,
        memory_fd: int,
        size_bytes: int,
        limits: DoorLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own the listener and start serving; `memory_fd` stays the caller's."""
        self.register = WriterRegister(limits)
        self._listener = listener
        self._access_key = access_key
        self._memory_fd = memory_fd
        self._size_bytes = size_bytes
        self._limits = limits
        self._clock = clock
        self._guests: OrderedDict[socket.socket, _Guest] = OrderedDict()  # oldest first
        self._writers: set[socket.socket] = set()
        self._listens_again_s: float | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="kv-shm-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop everybody and end the thread. To be called once."""
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for connection in [*self._guests, *self._writers]:
            connection.close()
        self._guests.clear()
        self._writers.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)
        self.register.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj == self._wake_fd:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            self._drop_late_guests()
            self._listen_again()

    def _wait_s(self) -> float | None:
        times = [guest.deadline_s for guest in self._guests.values()]
        if self._listens_again_s is not None:
            times.append(self._listens_again_s)
        return max(0.0, min(times) - self._clock()) if times else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            # No descriptor left: the connection stays in the backlog, and trying at once again
            # would only burn the core.
            logger.warning("a writer of KV cannot be accepted now: %s", error)
            self._selector.unregister(self._listener)
            self._listens_again_s = self._clock() + self._limits.accept_pause_s
            return
        connection.setblocking(False)
        if len(self._guests) >= self._limits.max_guests:
            self._drop(next(iter(self._guests)))
        self._guests[connection] = _Guest(
            connection=connection, deadline_s=self._clock() + self._limits.hello_timeout_s
        )
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_again(self) -> None:
        if self._listens_again_s is not None and self._clock() >= self._listens_again_s:
            self._listens_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        guest = self._guests.get(connection)
        if guest is None and connection not in self._writers:
            return  # dropped earlier in this round
        wanted = 1 if guest is None else shm_protocol.HELLO_BYTES - len(guest.received)
        try:
            received = connection.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received or guest is None:
            self._drop(connection)  # gone, or a writer that speaks out of turn
            return
        guest.received += received
        if len(guest.received) == shm_protocol.HELLO_BYTES:
            self._admit(connection, bytes(guest.received))

    def _admit(self, connection: socket.socket, raw: bytes) -> None:
        """Answer a whole hello; the connection becomes a writer's or is dropped."""
        hello = shm_protocol.decode_hello(raw)
        if hello is None or not hmac.compare_digest(hello.access_key, self._access_key):
            logger.warning("a connection without the access key was refused")
            self._drop(connection)
            return
        answer = self._judge(connection, hello)
        if answer is None:
            self._drop(connection)
            return
        fds = [self._memory_fd] if answer is Answer.ACCEPTED else []
        message = shm_protocol.encode_answer(answer, self._size_bytes)
        try:
            num_sent = socket.send_fds(connection, [message], fds)
        except OSError:
            num_sent = 0
        if answer is Answer.ACCEPTED and num_sent == len(message):
            del self._guests[connection]
            self._writers.add(connection)
        else:
            self._drop(connection)

    def _judge(self, connection: socket.socket, hello: Hello) -> Answer | None:
        """Return what to answer, None for nothing. An accepted process is recorded first: from
        the moment it gets the memory its death must be provable.
        """
        if not hello.is_current_version:
            return Answer.WRONG_VERSION
        if len(self._writers) >= self._limits.max_writers:
            return Answer.BUSY
        try:
            process = PeerProcess.of_socket(connection)
        except PeerRefusedError as error:
            logger.warning("a writer was refused: %s", error)
            return None
        if process.uid != os.geteuid():
            logger.warning("a writer of user %d was refused", process.uid)
            process.close()
            return None
        if not self.register.add(hello.incarnation, process):
            process.close()
            return Answer.BUSY
        return Answer.ACCEPTED

    def _drop_late_guests(self) -> None:
        now_s = self._clock()
        late = [guest.connection for guest in self._guests.values() if guest.deadline_s <= now_s]
        for connection in late:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._guests.pop(connection, None)
        self._writers.discard(connection)
        connection.close()
