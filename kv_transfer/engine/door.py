"""The thread that lets writers into a target.

One thread serves all connections and trusts none of them. Who does not say a whole, right hello in
time is dropped; who comes when all places are taken drops the guest that has waited longest, so
that loiterers cannot keep a writer out. What an accepted writer is told is up to the engine's
doorkeeper.
"""

import contextlib
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
from typing import Protocol

from kv_transfer.engine.door_protocol import (
    HELLO_BYTES,
    Answer,
    Hello,
    decode_hello,
    encode_answer,
)

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


class Doorkeeper(Protocol):
    """Decides over writers that know the key. Called on the door's thread only."""

    def welcome(self, connection: socket.socket, hello: Hello) -> Answer | None:
        """Send the whole answer when accepting. Any other answer is the door's to send; None
        drops the connection without one.
        """

    def close(self) -> None:
        """Forget everybody; the door is closed."""


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
        size_bytes: int,
        limits: DoorLimits,
        keeper: Doorkeeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own the listener and the keeper, and start serving.

        Args:
            listener: Non-blocking and listening.
            access_key: What a writer must know.
            size_bytes: Length of the target, told in every answer.
            limits: Bounds.
            keeper: Welcomes the writers.
            clock: Monotonic seconds.
        """
        self._listener = listener
        self._access_key = access_key
        self._keeper = keeper
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
        self._thread = threading.Thread(target=self._serve, name="kv-door", daemon=True)
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
        self._keeper.close()

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
        wanted = 1 if guest is None else HELLO_BYTES - len(guest.received)
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
        if len(guest.received) == HELLO_BYTES:
            self._admit(connection, bytes(guest.received))

    def _admit(self, connection: socket.socket, raw: bytes) -> None:
        """Answer a whole hello; the connection becomes a writer's or is dropped."""
        hello = decode_hello(raw)
        if hello is None or not hmac.compare_digest(hello.access_key, self._access_key):
            logger.warning("a connection without the access key was refused")
            self._drop(connection)
        elif not hello.is_current_version:
            self._refuse(connection, Answer.WRONG_VERSION)
        elif len(self._writers) >= self._limits.max_writers:
            self._refuse(connection, Answer.BUSY)
        else:
            answer = self._keeper.welcome(connection, hello)
            if answer is None:
                self._drop(connection)
            elif answer is Answer.ACCEPTED:
                del self._guests[connection]
                self._writers.add(connection)
            else:
                self._refuse(connection, answer)

    def _refuse(self, connection: socket.socket, answer: Answer) -> None:
        with contextlib.suppress(OSError):
            connection.send(encode_answer(answer, self._size_bytes))
        self._drop(connection)

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
