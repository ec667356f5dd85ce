"""What every transfer engine is: a target that owns memory, and links that write into it.

    create_target ──▶ TargetMemory ──close──▶ gone          (decode's side)
    connect ──▶ WriterLink ──close, or the peer dies──▶ gone (prefill's side)

The two promises on which reuse of memory rests:

* A `write` that has returned or raised has ended: no byte of it lands later, and its source is
  not read any more. An engine that cannot know this at once waits until it does, or destroys its
  transport first.
* `WriterState.DEAD` is said only when every process that could write for that incarnation is
  proven to have ended. Everything else, a closed connection included, is not a proof.

An engine with `can_fence_writer` keeps both of them for memory that is written directly. One
without it may only be given a staging area that the owner verifies and copies from: after a write
that raised, bytes may still land, and `WriterLink.proves_quiet` says so. Its owner has one means
against them, which is `TargetMemory.close`: when that returns nothing lands any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kv_transfer.digest import digest_rows
from kv_transfer.spans import ByteSpan, CopySpan

__all__ = [
    "MAX_BYTES_BETWEEN_CHECKS",
    "ByteSpan",
    "CopySpan",
    "TargetDescriptor",
    "TargetMemory",
    "TransferEngine",
    "WriterLink",
    "WriterState",
    "digest_rows",
]

# After a revoke at most this much is still written.
MAX_BYTES_BETWEEN_CHECKS = 1 << 20


class WriterState(Enum):
    """What the owner of a target knows about one writing incarnation."""

    UNKNOWN = "unknown"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDescriptor:
    """How to reach a target.

    Attributes:
        engine: Name of the engine.
        address: The engine's own address.
        access_key: What the engine demands from a writer; a secret.
        size_bytes: Length of the memory.
    """

    engine: str
    address: str
    access_key: bytes = field(repr=False)
    size_bytes: int


class TargetMemory(Protocol):
    """Memory that remote writers can reach. Owned by the process that made it."""

    @property
    def buffer(self) -> memoryview:
        """The memory as writable bytes; valid until `close`."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""

    @property
    def descriptor(self) -> TargetDescriptor:
        """What a writer needs in order to connect."""

    def writer_state(self, prefill_incarnation: str) -> WriterState:
        """Say what is known of a writer. Thread-safe; never blocks."""

    def close(self) -> None:
        """Accept no writer any more and let go of the memory. Idempotent.

        With an engine that cannot fence a writer this is the fence for all of them: nothing is
        written into the memory after it has returned.

        Views of `buffer` that are still in use keep the memory, and nothing else, alive.
        """


class WriterLink(Protocol):
    """A connection to one target. `write` may be called by several threads at once."""

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """Copy the spans in order and return the xxh3_64 of the source bytes in that order.

        Args:
            copies: All of them are checked against the target before the first byte is written.
            should_stop: Asked before the first byte and then at least every
                `MAX_BYTES_BETWEEN_CHECKS`.

        Raises:
            TargetBoundsError: A span leaves the target; nothing was written.
            WriteStoppedError: `should_stop` said so, or the link was closed.
            PeerDeadError: The owner of the target is gone.
            WriteFaultError: The bytes may have been written in part.
        """

    def peer_is_dead(self) -> bool:
        """Tell whether the owner of the target is gone, or cannot be written to any more.

        Thread-safe; never blocks.
        """

    def proves_quiet(self) -> bool:
        """Tell whether each write that has ended is known to have ended at the target as well."""

    def close(self) -> None:
        """Stop writes, wait for their end, and disconnect. Idempotent."""


class TransferEngine(Protocol):
    """Makes targets and connects to those of others."""

    @property
    def name(self) -> str:
        """As in descriptors and configuration."""

    @property
    def can_fence_writer(self) -> bool:
        """Whether the engine keeps the two promises of this module."""

    def create_target(self, num_bytes: int) -> TargetMemory:
        """Allocate memory, all of it now, and let writers connect.

        Raises:
            EngineConfigError: The size is not positive.
            TargetAllocationError: The memory cannot be had.
        """

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> WriterLink:
        """Connect to a target; blocks for at most `timeout_s`.

        Raises:
            EngineConfigError: The descriptor is not one of this engine.
            ConnectError: The target cannot be reached in time.
            PeerRefusedError: One side does not accept the other.
        """
