"""Token rows to bytes: which bytes of a pool hold given rows of one sequence.

A sequence lies in blocks; its row r is row r % block_size of its block number r // block_size.
Rows are the unit of grants and receipts, bytes that of engines. Nothing here assumes that the two
sides have the same block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """Token rows start .. end-1 of one sequence; never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        """Refuse an empty or negative range.

        Raises:
            LayoutError: As said.
        """
        if not 0 <= self.start < self.end:
            raise LayoutError("rows", f"{self.start}..{self.end}", "0 <= start < end")

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.end - self.start

    def __str__(self) -> str:
        """Print as a half-open interval."""
        return f"[{self.start}, {self.end})"

    def contains(self, other: "RowRange") -> bool:
        """Tell whether every row of `other` is in this range."""
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How to find the rows of one (layer, component) in one memory.

    Attributes:
        base: Address (or offset) of row 0 of block 0.
        block_stride_bytes: Distance between consecutive blocks.
        block_size: Rows per block; the rows of one block are contiguous.
        row_bytes: Size of one row.
    """

    base: int
    block_stride_bytes: int
    block_size: int
    row_bytes: int

    def start_of(self, row_in_pool: int) -> int:
        """Return where a row of the pool begins; rows count through all blocks."""
        block_id, row = divmod(row_in_pool, self.block_size)
        return self.base + block_id * self.block_stride_bytes + row * self.row_bytes


# Spans are made by the thousand per pushed layer, so they are named tuples: a frozen dataclass
# takes several times as long to build.


class ByteSpan(NamedTuple):
    """Bytes start .. start+num_bytes-1 of a memory."""

    start: int
    num_bytes: int


class CopySpan(NamedTuple):
    """One contiguous copy: from an absolute source address to an offset in the target."""

    source_address: int
    target_offset: int
    num_bytes: int


def byte_spans(placement: Placement, block_ids: Sequence[int], rows: RowRange) -> list[ByteSpan]:
    """Return the bytes of the rows in ascending row order; what adjoins is merged.

    Raises:
        LayoutError: The blocks end before the rows do.
    """
    size, row_bytes = placement.block_size, placement.row_bytes
    base, stride = placement.base, placement.block_stride_bytes
    check_blocks_cover(block_ids, size, rows)
    first, head_rows = divmod(rows.start, size)
    last, tail_rows = divmod(rows.end - 1, size)
    merged: list[ByteSpan] = []
    # The span at hand, as if it began with the first row of the first block.
    start = base + block_ids[first] * stride
    end = start + size * row_bytes
    start += head_rows * row_bytes
    for block_id in block_ids[first + 1 : last + 1]:
        place = base + block_id * stride
        if place != end:
            merged.append(ByteSpan(start, end - start))
            start = place
        end = place + size * row_bytes
    end -= (size - 1 - tail_rows) * row_bytes
    merged.append(ByteSpan(start, end - start))
    return merged


def copy_spans(
    source: Placement,
    source_block_ids: Sequence[int],
    target: Placement,
    target_block_ids: Sequence[int],
    rows: RowRange,
) -> list[CopySpan]:
    """Return the copies that move the rows, in ascending row order; what adjoins is merged.

    Args:
        source: Placement in absolute addresses.
        source_block_ids: The sequence's blocks on the source side, from row 0 on.
        target: Placement in offsets of the target.
        target_block_ids: The sequence's blocks on the target side, from row 0 on.
        rows: Rows of the sequence.

    Raises:
        LayoutError: Blocks end before the rows do, or the row sizes differ.
    """
    if source.row_bytes != target.row_bytes:
        raise LayoutError("row_bytes", target.row_bytes, source.row_bytes)
    reads = byte_spans(source, source_block_ids, rows)
    writes = byte_spans(target, target_block_ids, rows)
    # Both lists hold the same bytes in the same order, cut at different places: cut at all.
    copies: list[CopySpan] = []
    write_index = 0
    write_at, write_left = writes[0]
    for read_at, read_left in reads:
        at, left = read_at, read_left
        while left:
            if not write_left:
                write_index += 1
                write_at, write_left = writes[write_index]
            num_bytes = min(left, write_left)
            copies.append(CopySpan(at, write_at, num_bytes))
            at += num_bytes
            left -= num_bytes
            write_at += num_bytes
            write_left -= num_bytes
    return copies


def check_blocks_cover(block_ids: Sequence[int], block_size: int, rows: RowRange) -> None:
    """Refuse rows that lie beyond the listed blocks.

    Raises:
        LayoutError: As said.
    """
    if rows.end > len(block_ids) * block_size:
        raise LayoutError("rows.end", rows.end, f"<= {len(block_ids)} blocks of {block_size}")


def check_block_ids(field: str, block_ids: Sequence[int], num_blocks: int) -> None:
    """Refuse block ids that the pool does not have, and doubled ones.

    Raises:
        LayoutError: As said, naming `field`.
    """
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise LayoutError(field, block_id, f"0 <= id < {num_blocks}")
    if len(set(block_ids)) != len(block_ids):
        raise LayoutError(field, "doubled", "unique ids")
