"""The process at the other end of a Unix socket, held so that its death can be proven.

A process id may be used again after its process has ended; a pidfd stays with one process. It
becomes readable when the last thread has ended, which is when nothing can be written any more.
"""

import errno
import os
import select
import socket
import struct

from kv_transfer.errors import PeerRefusedError

_SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not name it
_UCRED = struct.Struct("3i")  # pid, uid, gid


class PeerProcess:
    """One process by its pidfd. Thread-safe until it is closed."""

    def __init__(self, pid: int, uid: int, pidfd: int) -> None:
        """Own the pidfd; see `of_socket`."""
        self.pid = pid
        self.uid = uid
        self._pidfd = pidfd
        self._is_dead = False

    @classmethod
    def of_socket(cls, connection: socket.socket) -> "PeerProcess":
        """Take hold of the process that made the other end (connected, or listened).

        Raises:
            PeerRefusedError: It has ended, or cannot be seen from here.
        """
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(raw)
        try:
            return cls(pid, uid, _peer_pidfd(connection, pid))
        except OSError as error:
            raise PeerRefusedError(f"process {pid} cannot be held: {error}") from error

    def is_dead(self) -> bool:
        """Tell whether the process has ended, for good."""
        if not self._is_dead:
            self._is_dead = is_ready(self._pidfd, select.POLLIN)
        return self._is_dead

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def is_ready(fd: int, events: int) -> bool:
    """Tell whether a descriptor is ready, or hung up, right now.

    A poll object may not be used by two threads at once, so each call makes its own.
    """
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(0))


def is_hung_up(connection: socket.socket) -> bool:
    """Tell whether the other end is closed, or every process that had it has ended."""
    return is_ready(connection.fileno(), select.POLLRDHUP)


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = os.pidfd_open(pid)
    # The id may have passed to a new process before it was held. If the other end is still open
    # now, then its process had not ended when the pidfd was made.
    if is_hung_up(connection):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, "the peer has ended")
    return pidfd
