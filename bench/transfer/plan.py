"""Which blocks move where. Both processes make the same plan from the same few numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kv_transfer.spans import ByteSpan, CopySpan

KIB, MIB = 1 << 10, 1 << 20
# A pool has twice the blocks of a push, so that the chosen ones are scattered in it.
POOL_FACTOR = 2


@dataclass(frozen=True, kw_only=True)
class PushPlan:
    """One push: `num_blocks` blocks, in random order out of either pool.

    Attributes:
        number: Its place in `PLANS`.
        block_bytes: Size of a block.
        num_blocks: Blocks of the push.
    """

    number: int
    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the push."""
        return self.block_bytes * self.num_blocks

    @property
    def label(self) -> str:
        """Block size for people and for the names of figures."""
        if self.block_bytes >= MIB:
            return f"{self.block_bytes // MIB}MiB"
        return f"{self.block_bytes // KIB}KiB"

    @cached_property
    def source_offsets(self) -> list[int]:
        """Where each block begins in the source pool."""
        return self._scattered(2 * self.number)

    @cached_property
    def target_offsets(self) -> list[int]:
        """Where each block begins in the target pool."""
        return self._scattered(2 * self.number + 1)

    def target_spans(self) -> list[ByteSpan]:
        """Return the target's bytes in the order of the push."""
        return [ByteSpan(offset, self.block_bytes) for offset in self.target_offsets]

    def copies(self, source_address: int) -> list[CopySpan]:
        """Return the copies, for a source pool at an address."""
        return [
            CopySpan(source_address + source, target, self.block_bytes)
            for source, target in zip(self.source_offsets, self.target_offsets, strict=True)
        ]

    def _scattered(self, seed: int) -> list[int]:
        blocks = random.Random(seed).sample(range(POOL_FACTOR * self.num_blocks), self.num_blocks)
        return [block * self.block_bytes for block in blocks]


PLANS = tuple(
    PushPlan(number=number, block_bytes=block_bytes, num_blocks=num_blocks)
    for number, (block_bytes, num_blocks) in enumerate(
        (
            (4 * KIB, 64),
            (16 * KIB, 64),
            (64 * KIB, 64),
            (256 * KIB, 64),
            (1 * MIB, 64),
            (8 * MIB, 8),
        )
    )
)
POOL_BYTES = POOL_FACTOR * max(plan.num_bytes for plan in PLANS)
SLOT_BYTES = 2 * MIB
NUM_SLOTS = 8


class SlotPart(NamedTuple):
    """Bytes of one block that travel in a slot.

    Attributes:
        source_offset: Where they lie in the source pool.
        slot_offset: Where they lie in the slot.
        target_offset: Where they belong in the target pool.
        num_bytes: How many.
    """

    source_offset: int
    slot_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoad:
    """What one use of a slot carries: the parts, in order and without gaps, and their sum."""

    parts: list[SlotPart]
    num_bytes: int


def slot_loads(plan: PushPlan) -> list[SlotLoad]:
    """Return what each use of a slot carries, in order; a block larger than a slot is cut."""
    loads: list[SlotLoad] = []
    parts: list[SlotPart] = []
    used = 0
    for source, target in zip(plan.source_offsets, plan.target_offsets, strict=True):
        done = 0
        while done < plan.block_bytes:
            size = min(SLOT_BYTES - used, plan.block_bytes - done)
            parts.append(SlotPart(source + done, used, target + done, size))
            done += size
            used += size
            if used == SLOT_BYTES:
                loads.append(SlotLoad(parts=parts, num_bytes=used))
                parts, used = [], 0
    if parts:
        loads.append(SlotLoad(parts=parts, num_bytes=used))
    return loads
