"""Index scores and the choice of keys, query by query and key by key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.paging import Array, PagedRequest, logical_row


def index_score(q: Array, weights: Array, key: Array) -> float:
    """Score of one key [Di] for one query: q [Hi, Di], weights [Hi]."""
    score = 0.0
    for head in range(q.shape[0]):
        score += weights[head] * max(0.0, float(np.dot(q[head], key)))
    return score


def index_scores(
    q: Array, weights: Array, key_cache: Array, request: PagedRequest, query: int
) -> list[float]:
    """Scores of every key that a query of the request sees, by position."""
    return [
        index_score(q, weights, logical_row(key_cache, request, position))
        for position in range(request.num_visible(query))
    ]


def choose(scores: Sequence[float], topk: int) -> list[int]:
    """The topk best positions, best first, the lower position first among equals, then -1."""
    ranked = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
    chosen = ranked[:topk]
    return chosen + [-1] * (topk - len(chosen))


def lightning_indexer(
    q: Array,
    weights: Array,
    key_cache: Array,
    requests: Sequence[PagedRequest],
    topk: int,
) -> list[list[int]]:
    """Choices of every row.

    Args:
        q: [T, Hi, Di].
        weights: [T, Hi].
        key_cache: [nb, bs, Di].
        requests: Requests in row order; rows behind the last one's are padding.
        topk: K.

    Returns:
        T rows of K positions.
    """
    rows: list[list[int]] = []
    for request in requests:
        for query in range(request.query_len):
            row = len(rows)
            scores = index_scores(q[row], weights[row], key_cache, request, query)
            rows.append(choose(scores, topk))
    while len(rows) < q.shape[0]:
        rows.append([-1] * topk)
    return rows
