"""Who may map a shared-memory target, and the proof that those who did have ended."""

import logging
import os
import socket
import threading
from collections import OrderedDict

from kv_transfer.engine.base import WriterState
from kv_transfer.engine.door import DoorLimits
from kv_transfer.engine.door_protocol import Answer, Hello, encode_answer
from kv_transfer.engine.peer_process import PeerProcess
from kv_transfer.errors import PeerRefusedError

logger = logging.getLogger(__name__)


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


class ShmDoorkeeper:
    """Passes the memory's descriptor to processes of this user."""

    def __init__(self, memory_fd: int, size_bytes: int, limits: DoorLimits) -> None:
        """Keep the descriptor, which stays the caller's."""
        self.register = WriterRegister(limits)
        self._memory_fd = memory_fd
        self._size_bytes = size_bytes

    def welcome(self, connection: socket.socket, hello: Hello) -> Answer | None:
        """As the protocol says. A process is recorded first: from the moment it gets the memory its
        death must be provable.
        """
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
        message = encode_answer(Answer.ACCEPTED, self._size_bytes)
        try:
            num_sent = socket.send_fds(connection, [message], [self._memory_fd])
        except OSError:
            return None
        return Answer.ACCEPTED if num_sent == len(message) else None

    def close(self) -> None:
        """As the protocol says."""
        self.register.close()
