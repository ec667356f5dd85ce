"""Copies spans of host memory and digests them on the way.

A push goes in pieces that the nearest caches hold, so the bytes are fetched once for digest and
copy. A piece takes a few microseconds and keeps the GIL: taking it back from a thread that runs
Python can cost a switch interval of 5 ms, a thousand times the copy. That interval is also what
another thread waits at most.
"""

import ctypes
from collections.abc import Callable, Sequence

from kv_transfer.digest import NewDigest
from kv_transfer.engine.base import MAX_BYTES_BETWEEN_CHECKS
from kv_transfer.errors import PeerDeadError, TargetBoundsError, WriteStoppedError
from kv_transfer.spans import CopySpan

# xxhash lets go of the GIL for more than 100 kB.
_PIECE_BYTES = 1 << 16
# User space on every 64-bit platform that Linux runs on with 4-level page tables.
_ADDRESS_SPACE_BYTES = 1 << 47


class HostMemory:
    """All memory of this process, to be copied from by address."""

    def __init__(self) -> None:
        """Look at everything.

        Slicing one view of the whole address space is the cheapest way to see memory by its
        address: making a ctypes array per span takes several times as long as a small copy.
        """
        everything = (ctypes.c_char * _ADDRESS_SPACE_BYTES).from_address(0)
        self.view = memoryview(everything).cast("B")

    def copy_to(
        self,
        source_address: int,
        target: memoryview,
        target_address: int,
        offset: int,
        num_bytes: int,
    ) -> None:
        """Copy to an offset of a target; view and address name the same bytes."""
        if num_bytes <= _PIECE_BYTES:
            target[offset : offset + num_bytes] = self.view[
                source_address : source_address + num_bytes
            ]
        else:
            ctypes.memmove(target_address + offset, source_address, num_bytes)


class HostCopier:
    """Writes into one mapped target."""

    def __init__(self, target: memoryview, new_digest: NewDigest) -> None:
        """Keep the target.

        Args:
            target: Writable view of bytes.
            new_digest: Called for each write.
        """
        self._target = target
        self._new_digest = new_digest
        self._memory = HostMemory().view

    def copy(
        self,
        copies: Sequence[CopySpan],
        should_stop: Callable[[], bool],
        peer_is_dead: Callable[[], bool],
    ) -> int:
        """Copy the spans in order; see `WriterLink.write`.

        Raises:
            TargetBoundsError: A span leaves the target; nothing was written.
            WriteStoppedError: `should_stop` said so.
            PeerDeadError: `peer_is_dead` said so.
        """
        check_bounds(copies, self._target.nbytes)
        digest = self._new_digest()
        update = digest.update
        target, memory = self._target, self._memory
        bytes_left = 0  # until the next check
        for source_address, target_offset, num_bytes in copies:
            at, end = target_offset, target_offset + num_bytes
            to_source = source_address - target_offset
            while at < end:
                piece_end = min(at + _PIECE_BYTES, end)
                size = piece_end - at
                if size > bytes_left:
                    _check_go_on(should_stop, peer_is_dead)
                    bytes_left = MAX_BYTES_BETWEEN_CHECKS
                bytes_left -= size
                piece = memory[at + to_source : piece_end + to_source]
                update(piece)
                target[at:piece_end] = piece
                at = piece_end
        return digest.intdigest()


def check_bounds(copies: Sequence[CopySpan], target_bytes: int) -> None:
    """Refuse spans that leave the target or the address space.

    Raises:
        TargetBoundsError: As said.
    """
    for source_address, target_offset, num_bytes in copies:
        if (
            num_bytes <= 0
            or target_offset < 0
            or target_offset + num_bytes > target_bytes
            or source_address <= 0
            or source_address + num_bytes > _ADDRESS_SPACE_BYTES
        ):
            raise TargetBoundsError(
                f"span of {num_bytes} bytes from {source_address:#x} to offset "
                f"{target_offset} leaves the target of {target_bytes} bytes"
            )


def _check_go_on(should_stop: Callable[[], bool], peer_is_dead: Callable[[], bool]) -> None:
    if should_stop():
        raise WriteStoppedError("the write was stopped")
    if peer_is_dead():
        raise PeerDeadError("the owner of the target is gone")
