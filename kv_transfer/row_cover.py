"""Which rows of one component have been reported: a set of rows that refuses doubles."""

from bisect import bisect_right

from kv_transfer.spans import RowRange


class RowCover:
    """Disjoint row ranges; adjoining ones are merged, so it stays as small as the gaps demand."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        """Start empty."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, rows: RowRange) -> bool:
        """Add rows; returns False, and adds nothing, when one of them is there already."""
        index = bisect_right(self._starts, rows.start)  # ranges before it start at or before
        if index > 0 and self._ends[index - 1] > rows.start:
            return False
        if index < len(self._starts) and self._starts[index] < rows.end:
            return False
        first, start, end = index, rows.start, rows.end
        if index > 0 and self._ends[index - 1] == rows.start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == rows.end:
            end = self._ends[index]
            index += 1
        self._starts[first:index] = [start]
        self._ends[first:index] = [end]
        return True

    def ranges(self) -> list[RowRange]:
        """Return what is covered, in ascending order."""
        return [RowRange(*pair) for pair in zip(self._starts, self._ends, strict=True)]
