"""The receiving side of each method: where blocks arrive, and what is done until they lie there."""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections.abc import Sequence
from typing import Protocol

from bench.transfer.control import Control, ControlError, Kind
from bench.transfer.plan import PLANS, SLOT_BYTES, PushPlan, slot_loads
from kv_transfer.digest import digest_rows
from kv_transfer.engine.base import TargetMemory
from kv_transfer.engine.host_copy import HostMemory
from kv_transfer.spans import ByteSpan


class Pool:
    """The target blocks of one method, all there from the beginning."""

    def __init__(self, memory: mmap.mmap | memoryview) -> None:
        """Look at memory."""
        self.memory = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(self.address, 0, self.memory.nbytes)  # so that no page is missing later

    def take(self, plan: PushPlan) -> int:
        """Return the digest of what a push left, and clear it: the next push cannot lean on it."""
        spans = plan.target_spans()
        digest = digest_rows(self.memory, spans)
        for span in spans:
            ctypes.memset(self.address + span.start, 0, span.num_bytes)
        return digest


class CpuClock(Protocol):
    """CPU time of some processes."""

    def __call__(self) -> int:
        """Return nanoseconds."""


class Landing(Protocol):
    """Receives the pushes of one method."""

    @property
    def pool(self) -> Pool:
        """Where they land."""

    def receive(self, plan: PushPlan, control: Control) -> None:
        """Serve one push until all blocks are in place and the sender knows."""


class OneSidedLanding:
    """The sender writes into the pool and says when it is done; nothing is looked at."""

    def __init__(self, pool: Pool) -> None:
        """Receive into `pool`."""
        self.pool = pool

    def receive(self, plan: PushPlan, control: Control) -> None:  # noqa: ARG002  the protocol's
        """As the protocol says."""
        control.expect(Kind.DONE)
        control.send(Kind.LANDED)


class VerifiedLanding:
    """The sender writes into the pool; the digest is checked before the push counts."""

    def __init__(self, pool: Pool) -> None:
        """Receive into `pool`."""
        self.pool = pool

    def receive(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        done = control.expect(Kind.DONE)
        _check(digest_rows(self.pool.memory, plan.target_spans()), done.first)
        control.send(Kind.LANDED)


class SocketLanding:
    """Blocks come through a TCP connection, each received where it belongs."""

    def __init__(self, pool: Pool, connection: socket.socket) -> None:
        """Receive into `pool`."""
        self.pool = pool
        self._connection = connection

    def receive(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        memory, size = self.pool.memory, plan.block_bytes
        for offset in plan.target_offsets:
            block = memory[offset : offset + size]
            while block:
                num_received = self._connection.recv_into(block, 0, socket.MSG_WAITALL)
                if not num_received:
                    raise ControlError("the sender has closed the connection")
                block = block[num_received:]
        control.send(Kind.LANDED)


class StagedLanding:
    """Blocks come packed into the slots of a ring; they are checked there and copied into place."""

    def __init__(self, pool: Pool, ring: TargetMemory, *, verifies: bool) -> None:
        """Receive into `pool` by way of `ring`; `verifies` is false where no digest is taken."""
        self.pool = pool
        self._ring = ring
        self._look = self._verify if verifies else _trust
        self._host = HostMemory()
        self._loads = {plan.number: slot_loads(plan) for plan in PLANS}

    def receive(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        pool, copy_to = self.pool, self._host.copy_to
        for load in self._loads[plan.number]:
            loaded = control.expect(Kind.LOADED)
            start = loaded.first * SLOT_BYTES
            self._look(ByteSpan(start, load.num_bytes), loaded.second)
            start += self._ring.address
            for _, slot_offset, target_offset, num_bytes in load.parts:
                copy_to(start + slot_offset, pool.memory, pool.address, target_offset, num_bytes)
            control.send(Kind.FREED, loaded.first)

    def _verify(self, span: ByteSpan, sent: int) -> None:
        _check(digest_rows(self._ring.buffer, [span]), sent)


def _trust(span: ByteSpan, sent: int) -> None:
    """Look at nothing."""


def _check(found: int, sent: int) -> None:
    if found != sent:
        raise ControlError(f"digest {sent:016x} was sent, {found:016x} is there")


def serve(landings: Sequence[Landing], control: Control, clocks: Sequence[CpuClock]) -> None:
    """Serve pushes until the sender is gone.

    Args:
        landings: By the numbers that the sender uses.
        control: Connected to it.
        clocks: For each landing, the CPU time of the processes that work for it.
    """
    while (message := control.receive()) is not None:
        if message.kind is not Kind.BEGIN:
            raise ControlError(f"{message.kind.name} came instead of BEGIN")
        landing, plan = landings[message.first], PLANS[message.second]
        clock = clocks[message.first]
        control.send(Kind.READY)
        before_ns = clock()
        landing.receive(plan, control)
        used_ns = clock() - before_ns
        control.expect(Kind.CHECK)
        control.send(Kind.FOUND, landing.pool.take(plan), used_ns)
