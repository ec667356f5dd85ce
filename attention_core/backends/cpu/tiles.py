"""Cut a step into tiles whose index scores fit a bounded buffer.

A tile is either several requests with equally many queries (a decode step, with or without
speculation) or a run of queries of one long request (a prefill chunk). Its scores are one
[G, n * Hi, S] tensor: G requests, n queries of each, S keys.

Memory: a tile holds at most max(budget, Hi * S) scores and max(budget, S * Di) gathered key
elements, S being at most the longest key length of the step; nothing grows with T * S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LENGTH_SLACK_TOKENS = 256
"""Requests share a tile while padding to the longest costs less than doubling plus this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Queries scored together.

    Attributes:
        requests: G request indices.
        first_rows: First row of each request's queries in this tile.
        num_queries: n, consecutive rows from each first row.
        num_keys: S, enough keys for every query of the tile.
    """

    requests: tuple[int, ...]
    first_rows: tuple[int, ...]
    num_queries: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class _Request:
    num_queries: int
    key_len: int
    index: int
    first_row: int


def score_tiles(
    cum_query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    num_heads: int,
    head_dim: int,
    budget: int,
) -> Iterator[Tile]:
    """Tiles that cover every query which sees a key, each once.

    Args:
        cum_query_lens: B running sums.
        key_lens: B lengths.
        num_heads: Hi.
        head_dim: Di.
        budget: Elements of a tile's scores, and of its gathered keys.
    """
    waiting: list[_Request] = []
    for request in _by_size(cum_query_lens, key_lens):
        if request.num_queries * num_heads * request.key_len > budget:
            yield from _split(request, num_heads, budget)
        elif _joins(waiting, request, num_heads, head_dim, budget):
            waiting.append(request)
        else:
            yield _together(waiting)
            waiting = [request]
    if waiting:
        yield _together(waiting)


def _by_size(cum_query_lens: Sequence[int], key_lens: Sequence[int]) -> list[_Request]:
    requests: list[_Request] = []
    first_row = 0
    for index, (end, key_len) in enumerate(zip(cum_query_lens, key_lens, strict=True)):
        if end > first_row and key_len > 0:
            requests.append(_Request(end - first_row, key_len, index, first_row))
        first_row = end
    requests.sort(key=lambda request: (request.num_queries, request.key_len))
    return requests


def _joins(
    waiting: Sequence[_Request], request: _Request, num_heads: int, head_dim: int, budget: int
) -> bool:
    if not waiting:
        return True
    if waiting[0].num_queries != request.num_queries:
        return False
    if request.key_len > 2 * waiting[0].key_len + _LENGTH_SLACK_TOKENS:
        return False
    widest = max(request.num_queries * num_heads, head_dim)
    return (len(waiting) + 1) * request.key_len * widest <= budget


def _together(requests: Sequence[_Request]) -> Tile:
    return Tile(
        requests=tuple(request.index for request in requests),
        first_rows=tuple(request.first_row for request in requests),
        num_queries=requests[0].num_queries,
        num_keys=requests[-1].key_len,
    )


def _split(request: _Request, num_heads: int, budget: int) -> Iterator[Tile]:
    """Runs of queries, each with just the keys its last query sees."""
    step = max(1, budget // (num_heads * request.key_len))
    for first in range(0, request.num_queries, step):
        end = min(first + step, request.num_queries)
        num_keys = request.key_len - request.num_queries + end
        if num_keys > 0:
            yield Tile(
                requests=(request.index,),
                first_rows=(request.first_row + first,),
                num_queries=end - first,
                num_keys=num_keys,
            )
