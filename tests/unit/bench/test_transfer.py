"""The transfer benchmark's plans and figures, and that a wrong byte would be noticed."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest

from bench.transfer.__main__ import figures
from bench.transfer.landing import Pool
from bench.transfer.methods import Method
from bench.transfer.plan import PLANS, POOL_BYTES, SLOT_BYTES, PushPlan, slot_loads
from kv_transfer.digest import digest_rows
from kv_transfer.spans import ByteSpan

PLAN = PushPlan(number=1, block_bytes=4096, num_blocks=16)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_plan_is_scattered_inside_the_pool_on_both_sides(plan: PushPlan) -> None:
    for offsets in (plan.source_offsets, plan.target_offsets):
        assert len(set(offsets)) == plan.num_blocks
        assert max(offsets) + plan.block_bytes <= POOL_BYTES
        assert all(offset % plan.block_bytes == 0 for offset in offsets)
        assert offsets != sorted(offsets)
    assert plan.source_offsets != plan.target_offsets


def test_plan_made_twice_is_the_same() -> None:
    again = PushPlan(number=1, block_bytes=4096, num_blocks=16)
    assert PLAN.copies(1 << 20) == again.copies(1 << 20)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_slot_loads_carry_every_byte_once_in_order(plan: PushPlan) -> None:
    loads = slot_loads(plan)
    moved: list[tuple[int, int, int]] = []
    for load in loads:
        assert load.num_bytes <= SLOT_BYTES
        at = 0
        for part in load.parts:
            assert part.slot_offset == at
            at += part.num_bytes
            moved.append((part.source_offset, part.target_offset, part.num_bytes))
        assert at == load.num_bytes
    assert all(load.num_bytes == SLOT_BYTES for load in loads[:-1])
    joined: list[tuple[int, int, int]] = []
    for source, target, size in moved:
        last = joined[-1] if joined else (0, 0, plan.block_bytes)
        if last[2] < plan.block_bytes:
            assert (source, target) == (last[0] + last[2], last[1] + last[2])
            joined[-1] = (last[0], last[1], last[2] + size)
        else:
            joined.append((source, target, size))
    expected = zip(plan.source_offsets, plan.target_offsets, strict=True)
    assert joined == [(source, target, plan.block_bytes) for source, target in expected]


def test_pool_take_notices_a_wrong_byte_and_clears_what_it_took() -> None:
    source = mmap.mmap(-1, PLAN.num_bytes * 2)
    source[:] = random.Random(1).randbytes(len(source))
    target = mmap.mmap(-1, PLAN.num_bytes * 2)
    pool = Pool(target)
    spans = [ByteSpan(offset, PLAN.block_bytes) for offset in PLAN.source_offsets]
    expected = digest_rows(memoryview(source), spans)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))

    def push() -> None:
        for source_address, offset, size in PLAN.copies(address):
            ctypes.memmove(pool.address + offset, source_address, size)

    push()
    assert pool.take(PLAN) == expected
    assert pool.take(PLAN) != expected
    push()
    target[PLAN.target_offsets[-1] + 4095] ^= 1
    assert pool.take(PLAN) != expected


def test_figures_are_ratios_of_medians() -> None:
    push_s = {
        ("1MiB", Method.MEMCPY): 4.0,
        ("8MiB", Method.MEMCPY): 4.0,
        ("1MiB", Method.SHM_NO_DIGEST): 5.0,
        ("8MiB", Method.SHM_NO_DIGEST): 4.0,
        ("1MiB", Method.SHM): 10.0,
        ("1MiB", Method.TCP): 20.0,
        ("1MiB", Method.MOONCAKE): 40.0,
        ("1MiB", Method.MOONCAKE_NO_DIGEST): 36.0,
        ("16KiB", Method.MOONCAKE): 0.5,
        ("16KiB", Method.MOONCAKE_NAIVE): 3.0,
    }
    found = figures(push_s)
    assert found == pytest.approx(
        {
            "shm_vs_memcpy_1MiB": 0.8,
            "shm_vs_memcpy_8MiB": 1.0,
            "checksum_share_shm": 0.5,
            "mooncake_vs_tcp_1MiB": 0.5,
            "mooncake_vs_naive_16KiB": 6.0,
            "checksum_share_mooncake": 0.1,
        }
    )
    without = {key: value for key, value in push_s.items() if "mooncake" not in key[1]}
    assert set(figures(without)) == {
        "shm_vs_memcpy_1MiB",
        "shm_vs_memcpy_8MiB",
        "checksum_share_shm",
    }
