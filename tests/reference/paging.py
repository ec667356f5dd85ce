"""A request of one step and its rows in a paged cache, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRequest:
    """One request of a step.

    Attributes:
        query_len: Its rows of the step; the last of them sees every key.
        key_len: Its keys; with fewer keys than queries the first queries see nothing.
        block_ids: Block of the keys [m*bs, (m+1)*bs) at place m.
    """

    query_len: int
    key_len: int
    block_ids: Sequence[int]

    def num_visible(self, query: int) -> int:
        """Keys that the query with this place in the request sees: the first ones."""
        return max(0, self.key_len - self.query_len + query + 1)


def logical_row(cache: Array, request: PagedRequest, position: int) -> Array:
    """The cache row [W] of a position of the request; cache [nb, bs, W]."""
    block_size = cache.shape[1]
    row: Array = cache[request.block_ids[position // block_size], position % block_size]
    return row


def logical_rows(cache: Array, request: PagedRequest, num_rows: int) -> Array:
    """The first rows [num_rows, W] of the request, in order."""
    rows = np.zeros((num_rows, cache.shape[2]))
    for position in range(num_rows):
        rows[position] = logical_row(cache, request, position)
    return rows
