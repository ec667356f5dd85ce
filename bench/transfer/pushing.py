"""The sending side of each method."""

from __future__ import annotations

import ctypes
import mmap
import socket
from typing import Protocol

from bench.transfer.control import Control, Kind
from bench.transfer.naive import NaiveEngine
from bench.transfer.plan import NUM_SLOTS, PLANS, SLOT_BYTES, PushPlan, SlotLoad, slot_loads
from kv_transfer.engine.base import CopySpan, WriterLink


class Push(Protocol):
    """Makes the pushes of one method. What a plan needs is prepared before the first."""

    def run(self, plan: PushPlan, control: Control) -> None:
        """Push once; returns when the receiver has said that all blocks are in place."""


class MemcpyPush:
    """One memmove per block into memory that both processes map."""

    def __init__(self, source_address: int, target: mmap.mmap) -> None:
        """Copy into `target`, and keep it."""
        self._target = target
        target_address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        ctypes.memset(target_address, 0, len(target))  # so that no page is missing later
        self._moves = {
            plan.number: [
                (target_address + offset, address, size)
                for address, offset, size in plan.copies(source_address)
            ]
            for plan in PLANS
        }

    def run(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        memmove = ctypes.memmove
        for target, source, size in self._moves[plan.number]:
            memmove(target, source, size)
        _tell_and_wait(control)


class LinkPush:
    """One write through an engine's link, straight into the blocks."""

    def __init__(self, source_address: int, link: WriterLink) -> None:
        """Write through `link`."""
        self._copies = {plan.number: plan.copies(source_address) for plan in PLANS}
        self._link = link

    def run(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        _tell_and_wait(control, self._link.write(self._copies[plan.number], _never))


class SocketPush:
    """One sendmsg after the other over a TCP connection, until all blocks are out."""

    def __init__(self, source: memoryview, connection: socket.socket) -> None:
        """Send from a pool."""
        self._blocks = {
            plan.number: [
                source[offset : offset + plan.block_bytes] for offset in plan.source_offsets
            ]
            for plan in PLANS
        }
        self._connection = connection

    def run(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        blocks = self._blocks[plan.number]
        first, skipped = 0, 0  # blocks that are out, bytes of the next one that are out
        while first < len(blocks):
            num_sent = skipped + self._connection.sendmsg(
                [blocks[first][skipped:], *blocks[first + 1 :]]
            )
            done, skipped = divmod(num_sent, plan.block_bytes)
            first += done
        control.expect(Kind.LANDED)


class NaivePush:
    """One batch of all blocks through the bare Mooncake package."""

    def __init__(
        self, source_address: int, engine: NaiveEngine, session: str, target_address: int
    ) -> None:
        """Write to the receiver's engine at `session`."""
        self._engine = engine
        self._session = session
        self._batches = {
            plan.number: (
                [source_address + offset for offset in plan.source_offsets],
                [target_address + offset for offset in plan.target_offsets],
                [plan.block_bytes] * plan.num_blocks,
            )
            for plan in PLANS
        }

    def run(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        self._engine.write(self._session, *self._batches[plan.number])
        _tell_and_wait(control)


class StagedPush:
    """Packs blocks into the slots of a ring, as many as are free, one write per slot."""

    def __init__(self, source_address: int, link: WriterLink) -> None:
        """Write through `link`, whose target is the ring."""
        self._link = link
        self._writes = {
            plan.number: [
                [_into_slot(load, slot, source_address) for slot in range(NUM_SLOTS)]
                for load in slot_loads(plan)
            ]
            for plan in PLANS
        }

    def run(self, plan: PushPlan, control: Control) -> None:
        """As the protocol says."""
        free = list(range(NUM_SLOTS))
        for by_slot in self._writes[plan.number]:
            if not free:
                free.append(control.expect(Kind.FREED).first)
            slot = free.pop()
            control.send(Kind.LOADED, slot, self._link.write(by_slot[slot], _never))
        while len(free) < NUM_SLOTS:
            free.append(control.expect(Kind.FREED).first)


def _into_slot(load: SlotLoad, slot: int, source_address: int) -> list[CopySpan]:
    return [
        CopySpan(
            source_address + part.source_offset,
            slot * SLOT_BYTES + part.slot_offset,
            part.num_bytes,
        )
        for part in load.parts
    ]


def _tell_and_wait(control: Control, digest: int = 0) -> None:
    control.send(Kind.DONE, digest)
    control.expect(Kind.LANDED)


def _never() -> bool:
    return False
