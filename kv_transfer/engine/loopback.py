"""The engine inside one process: really copies, and answers life-cycle questions like the others.

Writers have no process of their own here, so their end is told: `end_writer` says that a prefill
incarnation has died. From then on its links write nothing, and its state is DEAD.
"""

import ctypes
import hmac
import itertools
import mmap
import secrets
import threading
from collections.abc import Callable, Sequence

from kv_transfer.digest import new_xxh3
from kv_transfer.engine.base import CopySpan, TargetDescriptor, WriterState
from kv_transfer.engine.gate import CloseGate
from kv_transfer.engine.host_copy import HostCopier
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerRefusedError,
    TargetAllocationError,
)

ACCESS_KEY_BYTES = 32


class LoopbackTarget:
    """Memory of this process, with the incarnations that connected to it."""

    def __init__(self, address: str, num_bytes: int) -> None:
        """Allocate zeroed, page-aligned memory.

        Raises:
            TargetAllocationError: It cannot be had.
        """
        try:
            self._mapping = mmap.mmap(-1, num_bytes)
        except (OSError, OverflowError) as error:
            raise TargetAllocationError(f"{num_bytes} bytes: {error}") from error
        self.buffer = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.descriptor = TargetDescriptor(
            engine=LoopbackEngine.name,
            address=address,
            access_key=secrets.token_bytes(ACCESS_KEY_BYTES),
            size_bytes=num_bytes,
        )
        self.is_closed = False
        self._lock = threading.Lock()
        self._states: dict[str, WriterState] = {}

    def writer_state(self, prefill_incarnation: str) -> WriterState:
        """As the protocol says."""
        with self._lock:
            return self._states.get(prefill_incarnation, WriterState.UNKNOWN)

    def note_connected(self, prefill_incarnation: str) -> None:
        """Remember a writer."""
        with self._lock:
            self._states[prefill_incarnation] = WriterState.ALIVE

    def note_ended(self, prefill_incarnation: str) -> None:
        """Remember that a writer has died, if it was one."""
        with self._lock:
            if prefill_incarnation in self._states:
                self._states[prefill_incarnation] = WriterState.DEAD

    def close(self) -> None:
        """As the protocol says; links see a dead peer. The mapping goes with its last view."""
        self.is_closed = True


class LoopbackLink:
    """Writes into a target of the same process."""

    def __init__(self, target: LoopbackTarget, on_close: Callable[["LoopbackLink"], None]) -> None:
        """Connect; `on_close` is told once."""
        self._target = target
        self._copier = HostCopier(target.buffer, new_xxh3)
        self._gate = CloseGate()
        self._on_close = on_close

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """As the protocol says."""
        with self._gate.entered():
            return self._copier.copy(
                copies, lambda: self._gate.is_closing or should_stop(), self.peer_is_dead
            )

    def peer_is_dead(self) -> bool:
        """As the protocol says."""
        return self._target.is_closed

    def proves_quiet(self) -> bool:
        """As the protocol says: a copy that has ended has ended."""
        return True

    def close(self) -> None:
        """As the protocol says."""
        if self._gate.close():
            self._on_close(self)


class LoopbackEngine:
    """Targets and links of one process. Thread-safe."""

    name = "loopback"
    can_fence_writer = True

    def __init__(self) -> None:
        """Start without targets."""
        self._lock = threading.Lock()
        self._targets: dict[str, LoopbackTarget] = {}
        self._links: dict[LoopbackLink, str] = {}
        self._ended: set[str] = set()
        self._numbers = itertools.count(1)

    def create_target(self, num_bytes: int) -> LoopbackTarget:
        """As the protocol says."""
        if num_bytes <= 0:
            raise EngineConfigError("num_bytes", num_bytes, ">= 1")
        with self._lock:
            address = f"loopback-{next(self._numbers)}"
            target = LoopbackTarget(address, num_bytes)
            closed = [key for key, other in self._targets.items() if other.is_closed]
            for key in closed:
                del self._targets[key]
            self._targets[address] = target
        return target

    def connect(
        self,
        descriptor: TargetDescriptor,
        prefill_incarnation: str,
        timeout_s: float,  # noqa: ARG002  the protocol's; nothing blocks here
    ) -> LoopbackLink:
        """As the protocol says; never blocks."""
        if descriptor.engine != self.name:
            raise EngineConfigError("descriptor.engine", descriptor.engine, self.name)
        with self._lock:
            target = self._targets.get(descriptor.address)
            if target is None or target.is_closed:
                raise ConnectError(f"no target at {descriptor.address}")
            if not hmac.compare_digest(target.descriptor.access_key, descriptor.access_key):
                raise PeerRefusedError("the target refused the access key")
            if target.descriptor.size_bytes != descriptor.size_bytes:
                raise PeerRefusedError(
                    f"the target has {target.descriptor.size_bytes} bytes, the descriptor says "
                    f"{descriptor.size_bytes}"
                )
            if prefill_incarnation in self._ended:
                raise PeerRefusedError(f"writer {prefill_incarnation} has ended")
            target.note_connected(prefill_incarnation)
            link = LoopbackLink(target, self._forget)
            self._links[link] = prefill_incarnation
        return link

    def end_writer(self, prefill_incarnation: str) -> None:
        """Say that the writing process has died: its links end first, then it counts as dead."""
        with self._lock:
            self._ended.add(prefill_incarnation)
            links = [link for link, writer in self._links.items() if writer == prefill_incarnation]
            targets = list(self._targets.values())
        for link in links:
            link.close()
        for target in targets:
            target.note_ended(prefill_incarnation)

    def _forget(self, link: LoopbackLink) -> None:
        with self._lock:
            self._links.pop(link, None)
