"""The choice among equal scores, row by row against a plain sort."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_core.backends.cpu.topk import exact_topk


def by_sorting(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda position: (-row[position], position))[:k]


@given(
    num_rows=st.integers(0, 5),
    num_scores=st.integers(1, 40),
    num_values=st.integers(1, 50),
    k=st.integers(1, 45),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=200)
def test_exact_topk_with_many_equal_scores_ranks_as_a_sort(
    num_rows: int, num_scores: int, num_values: int, k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-num_values, num_values, (num_rows, num_scores), generator=generator)
    scores = whole.float()
    chosen = exact_topk(scores, k)
    assert chosen.shape == (num_rows, min(k, num_scores))
    assert chosen.tolist() == [by_sorting(row, k) for row in scores.tolist()]


def test_exact_topk_with_both_zeros_takes_them_for_equal() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert exact_topk(scores, 3).tolist() == [[0, 1, 2]]


def test_exact_topk_with_a_tie_of_thousands_at_the_cut_takes_the_lowest() -> None:
    scores = torch.zeros(2, 5000)
    scores[0, 4000] = 1.0
    chosen = exact_topk(scores, 64)
    assert chosen[0].tolist() == [4000, *range(63)]
    assert chosen[1].tolist() == list(range(64))


def test_exact_topk_with_few_real_scores_puts_them_first() -> None:
    scores = torch.full((1, 100), -torch.inf)
    scores[0, 70], scores[0, 20], scores[0, 50] = 1.0, 1.0, 2.0
    assert exact_topk(scores, 10)[0, :3].tolist() == [50, 20, 70]
