"""Writes through a sending Mooncake engine: packs spans, and lets one request move many of them.

    source rows ──copy, digest──▶ bounce memory ──Mooncake──▶ target

What costs is the request, not the byte, so spans that adjoin at the target travel together. While
one piece is under way the next is packed. The engine reads the bounce memory only: when it fails,
and might go on, the source rows are untouched by that, and its process is killed.
"""

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.digest import NewDigest
from kv_transfer.engine.base import MAX_BYTES_BETWEEN_CHECKS, CopySpan
from kv_transfer.engine.gate import CloseGate
from kv_transfer.engine.host_copy import HostMemory, check_bounds
from kv_transfer.engine.mooncake_child import COMMAND, DONE, REPLY
from kv_transfer.engine.mooncake_process import MooncakeProcess
from kv_transfer.engine.peer_process import is_hung_up
from kv_transfer.errors import PeerDeadError, WriteFaultError, WriteStoppedError

_NUM_PIECES = 4
BOUNCE_BYTES = _NUM_PIECES * MAX_BYTES_BETWEEN_CHECKS
# The engine itself gives up on a stopped peer after 3 s; this is for an engine that does not.
_REPLY_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Adjoining bytes of the target that one request writes.

    Attributes:
        target_offset: Where they begin.
        parts: (source address, bytes) in order.
        num_bytes: Sum over the parts.
    """

    target_offset: int
    parts: list[tuple[int, int]]
    num_bytes: int


def pieces(copies: Sequence[CopySpan], max_bytes: int) -> Iterator[Piece]:
    """Cut and join spans to pieces of at most `max_bytes`, in order."""
    parts: list[tuple[int, int]] = []
    start, size = 0, 0
    for source_address, target_offset, num_bytes in copies:
        at, left = target_offset, num_bytes
        while left:
            if parts and (at != start + size or size == max_bytes):
                yield Piece(target_offset=start, parts=parts, num_bytes=size)
                parts, size = [], 0
            if not parts:
                start = at
            taken = min(left, max_bytes - size)
            parts.append((source_address + at - target_offset, taken))
            size += taken
            at += taken
            left -= taken
    if parts:
        yield Piece(target_offset=start, parts=parts, num_bytes=size)


class MooncakeLink:
    """A connection to one target, with a sending engine of its own."""

    def __init__(
        self,
        *,
        connection: socket.socket,
        process: MooncakeProcess,
        bounce: mmap.mmap,
        target_address: int,
        target_bytes: int,
        new_digest: NewDigest,
    ) -> None:
        """Own the door's connection, the sender's process and the memory shared with it."""
        self._owner_pid = os.getpid()
        self._connection = connection
        self._process = process
        self._bounce = bounce
        self._bounce_view = memoryview(bounce)
        self._bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        self._memory = HostMemory()
        self._target_address = target_address
        self._target_bytes = target_bytes
        self._new_digest = new_digest
        self._gate = CloseGate()
        self._turn = threading.Lock()  # one writer at a time
        self._is_broken = False
        self._has_died = False

    @property
    def sender_pid(self) -> int:
        """Process of the sending engine."""
        return self._process.pid

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """As the protocol says. After a fault the link is of no use any more."""
        if os.getpid() != self._owner_pid:
            raise WriteFaultError("the link belongs to the parent of this process")
        with self._gate.entered():
            if not copies:
                return self._new_digest().intdigest()
            check_bounds(copies, self._target_bytes)
            with self._turn:
                return self._write(copies, should_stop)

    def peer_is_dead(self) -> bool:
        """As the protocol says; after `close`, what was known last."""
        try:
            with self._gate.entered():
                return self._look()
        except WriteStoppedError:
            return self._has_died

    def proves_quiet(self) -> bool:
        """As the protocol says: false once a write has failed."""
        return not self._is_broken

    def close(self) -> None:
        """As the protocol says. A forked child leaves the link to its parent."""
        if os.getpid() == self._owner_pid and self._gate.close():
            self._process.kill()
            self._bounce_view.release()
            self._connection.close()

    def _look(self) -> bool:
        if not self._has_died:
            self._has_died = (
                self._is_broken or is_hung_up(self._connection) or self._process.is_dead()
            )
        return self._has_died

    def _write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        digest = self._new_digest()
        free = list(range(_NUM_PIECES))
        under_way: set[int] = set()
        try:
            for piece in pieces(copies, MAX_BYTES_BETWEEN_CHECKS):
                if not free:
                    free.append(self._await_reply(under_way))
                self._check_go_on(should_stop)
                tag = free.pop()
                offset = tag * MAX_BYTES_BETWEEN_CHECKS
                self._pack(piece, offset)
                digest.update(self._bounce_view[offset : offset + piece.num_bytes])
                under_way.add(tag)
                address = self._target_address + piece.target_offset
                if not self._process.send(COMMAND.pack(tag, offset, address, piece.num_bytes)):
                    raise self._break("its engine has ended")
        finally:
            # Whatever ended the loop: what was sent is over before this returns.
            while under_way and not self._is_broken:
                self._await_reply(under_way)
        return digest.intdigest()

    def _pack(self, piece: Piece, offset: int) -> None:
        at = offset
        for source_address, num_bytes in piece.parts:
            self._memory.copy_to(
                source_address, self._bounce_view, self._bounce_address, at, num_bytes
            )
            at += num_bytes

    def _await_reply(self, under_way: set[int]) -> int:
        """Return the tag of a piece that has landed.

        Raises:
            PeerDeadError, WriteFaultError: One has not; the link is broken.
        """
        raw = self._process.receive(_REPLY_TIMEOUT_S)
        if raw is None:
            raise self._break(f"it has not ended within {_REPLY_TIMEOUT_S:g} s")
        if not raw:
            raise self._break("its engine has ended")
        tag, status = REPLY.unpack(raw)
        under_way.discard(tag)
        if status != DONE:
            raise self._break(f"the engine reports {status}")
        return int(tag)

    def _break(self, why: str) -> WriteFaultError | PeerDeadError:
        """End the sending engine, because it may be writing on; returns what to raise."""
        self._is_broken = True
        self._process.kill()
        if is_hung_up(self._connection):
            return PeerDeadError(f"the owner of the target is gone: {why}")
        return WriteFaultError(f"a write failed: {why}")

    def _check_go_on(self, should_stop: Callable[[], bool]) -> None:
        if self._gate.is_closing or should_stop():
            raise WriteStoppedError("the write was stopped")
        if self._look():
            raise PeerDeadError("the owner of the target is gone")
