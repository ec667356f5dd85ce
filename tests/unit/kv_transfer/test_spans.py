"""Rows to bytes, against a model that handles one row at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import LayoutError
from kv_transfer.spans import (
    ByteSpan,
    CopySpan,
    Placement,
    RowRange,
    byte_spans,
    check_block_ids,
    copy_spans,
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, list[int], RowRange]:
    """Block size, blocks of a sequence, and rows inside them."""
    block_size = draw(st.sampled_from([1, 2, 3, 8, 64, 128]))
    block_ids = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True))
    start = draw(st.integers(0, len(block_ids) * block_size - 1))
    end = draw(st.integers(start + 1, len(block_ids) * block_size))
    return block_size, block_ids, RowRange(start, end)


def naive_starts(
    placement: Placement, block_ids: list[int] | tuple[int, ...], rows: RowRange
) -> list[int]:
    """Where each row starts, one at a time."""
    size = placement.block_size
    return [
        placement.base
        + block_ids[row // size] * placement.block_stride_bytes
        + (row % size) * placement.row_bytes
        for row in range(rows.start, rows.end)
    ]


@given(sequences(), st.integers(1, 9), st.integers(0, 1000), st.integers(0, 5))
def test_byte_spans_any_rows_are_the_naive_bytes_merged(
    sequence: tuple[int, list[int], RowRange], row_bytes: int, base: int, padding: int
) -> None:
    block_size, block_ids, rows = sequence
    placement = Placement(
        base=base,
        block_stride_bytes=block_size * row_bytes + padding,
        block_size=block_size,
        row_bytes=row_bytes,
    )
    spans = byte_spans(placement, block_ids, rows)
    found = [byte for start, size in spans for byte in range(start, start + size)]
    assert found == [
        byte
        for start in naive_starts(placement, block_ids, rows)
        for byte in range(start, start + row_bytes)
    ]
    for one, following in itertools.pairwise(spans):
        assert one.start + one.num_bytes != following.start, "not merged"


@given(st.data(), sequences(), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5))
def test_copy_spans_block_sizes_that_differ_pair_each_row_with_itself(
    data: st.DataObject,
    sequence: tuple[int, list[int], RowRange],
    row_bytes: int,
    source_padding: int,
    target_padding: int,
) -> None:
    block_size, block_ids, rows = sequence
    target_size = data.draw(st.sampled_from([1, 2, 3, 8, 64, 128]))
    num_target_blocks = -(-rows.end // target_size)
    target_ids = data.draw(st.permutations(range(num_target_blocks + 2)))
    source = Placement(
        base=10_000_000,
        block_stride_bytes=block_size * row_bytes + source_padding,
        block_size=block_size,
        row_bytes=row_bytes,
    )
    target = Placement(
        base=17,
        block_stride_bytes=target_size * row_bytes + target_padding,
        block_size=target_size,
        row_bytes=row_bytes,
    )
    copies = copy_spans(source, block_ids, target, target_ids, rows)
    found = [
        (copy.source_address + i, copy.target_offset + i)
        for copy in copies
        for i in range(copy.num_bytes)
    ]
    starts = zip(
        naive_starts(source, block_ids, rows),
        naive_starts(target, tuple(target_ids), rows),
        strict=True,
    )
    assert found == [(a + i, b + i) for a, b in starts for i in range(row_bytes)]
    for one, following in itertools.pairwise(copies):
        joins = (
            one.source_address + one.num_bytes == following.source_address
            and one.target_offset + one.num_bytes == following.target_offset
        )
        assert not joins, "not merged"


@pytest.mark.parametrize(("source_size", "target_size"), [(64, 128), (128, 64)])
def test_copy_spans_64_and_128_rows_contiguous_blocks_become_one_copy(
    source_size: int, target_size: int
) -> None:
    source = Placement(
        base=4096, block_stride_bytes=source_size * 8, block_size=source_size, row_bytes=8
    )
    target = Placement(
        base=0, block_stride_bytes=target_size * 8, block_size=target_size, row_bytes=8
    )
    source_ids, target_ids = list(range(256 // source_size)), list(range(256 // target_size))
    assert copy_spans(source, source_ids, target, target_ids, RowRange(0, 200)) == [
        CopySpan(4096, 0, 1600)
    ]


def test_copy_spans_different_row_sizes_are_refused() -> None:
    one = Placement(base=0, block_stride_bytes=8, block_size=1, row_bytes=8)
    other = Placement(base=0, block_stride_bytes=8, block_size=1, row_bytes=4)
    with pytest.raises(LayoutError, match="row_bytes"):
        copy_spans(one, [0], other, [0], RowRange(0, 1))


def test_byte_spans_rows_beyond_the_blocks_are_refused() -> None:
    placement = Placement(base=0, block_stride_bytes=16, block_size=4, row_bytes=4)
    assert byte_spans(placement, [1, 0], RowRange(3, 8)) == [ByteSpan(28, 4), ByteSpan(0, 16)]
    with pytest.raises(LayoutError, match=r"rows\.end"):
        byte_spans(placement, [1, 0], RowRange(3, 9))


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 2), (-1, 4)])
def test_row_range_empty_or_negative_is_refused(start: int, end: int) -> None:
    with pytest.raises(LayoutError):
        RowRange(start, end)


def test_row_range_contains_only_what_is_wholly_inside() -> None:
    outer = RowRange(2, 8)
    assert outer.contains(RowRange(2, 8))
    assert not outer.contains(RowRange(1, 3))
    assert not outer.contains(RowRange(7, 9))
    assert len(outer) == 6


@pytest.mark.parametrize("block_ids", [(0, 5), (-1,), (1, 1)])
def test_check_block_ids_foreign_or_doubled_are_refused(block_ids: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="blocks"):
        check_block_ids("blocks", block_ids, 5)
