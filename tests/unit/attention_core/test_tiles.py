"""Tiles cover every query that sees a key once, within their memory bound."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from attention_core.backends.cpu.tiles import score_tiles

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=8)


@given(
    lengths=LENGTHS,
    num_heads=st.integers(1, 8),
    head_dim=st.integers(1, 64),
    budget=st.integers(1, 20_000),
)
def test_score_tiles_cover_each_seeing_query_once_within_the_bound(
    lengths: list[tuple[int, int]], num_heads: int, head_dim: int, budget: int
) -> None:
    ends = list(accumulate(queries for queries, _ in lengths))
    key_lens = [keys for _, keys in lengths]
    visible = {
        end - queries + i: (request, keys - queries + i + 1)
        for request, ((queries, keys), end) in enumerate(zip(lengths, ends, strict=True))
        for i in range(queries)
    }
    covered: list[int] = []
    for tile in score_tiles(ends, key_lens, num_heads=num_heads, head_dim=head_dim, budget=budget):
        num_requests, longest = len(tile.requests), tile.num_keys
        assert 0 < longest <= max(key_lens)
        scores = num_requests * tile.num_queries * num_heads * longest
        assert scores <= max(budget, num_heads * max(key_lens))
        assert num_requests * longest * head_dim <= max(budget, longest * head_dim)
        for request, first_row in zip(tile.requests, tile.first_rows, strict=True):
            for row in range(first_row, first_row + tile.num_queries):
                assert visible[row][0] == request
                assert visible[row][1] <= longest
                covered.append(row)
    assert len(covered) == len(set(covered))
    seeing = {row for row, (_, num_visible) in visible.items() if num_visible > 0}
    assert seeing <= set(covered)


def test_score_tiles_put_a_decode_step_into_one_tile() -> None:
    tiles = list(
        score_tiles([1, 2, 3, 3], [90, 100, 70, 0], num_heads=8, head_dim=32, budget=10_000)
    )
    assert [tile.requests for tile in tiles] == [(2, 0, 1)]
    assert tiles[0].first_rows == (2, 0, 1)


def test_score_tiles_keep_very_unequal_lengths_apart() -> None:
    tiles = list(score_tiles([1, 2], [10, 5000], num_heads=1, head_dim=1, budget=1 << 20))
    assert [tile.requests for tile in tiles] == [(0,), (1,)]


def test_score_tiles_of_a_long_prompt_score_only_what_is_visible() -> None:
    tiles = list(score_tiles([100], [100], num_heads=1, head_dim=1, budget=1000))
    assert [tile.num_queries for tile in tiles] == [10] * 10
    assert [tile.num_keys for tile in tiles] == list(range(10, 101, 10))
