"""What every backend's choice of keys and attention promise, against the float64 oracles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_core.errors import AttentionConfigError
from attention_core.plan import AttentionPlan, HostLens
from tests.reference import lightning_indexer as reference_indexer
from tests.reference import sparse_attention as reference_attention
from tests.reference.paging import PagedRequest
from tests.support.kernel_cases import (
    ALL_PADDING,
    EMPTY_AMONG_OTHERS,
    NOTHING_AT_ALL,
    ONE_KEY,
    Backend,
    StepCase,
    assert_same_but_for_rounding,
    make_plan,
    normal,
    poison_padding_rows,
    poison_unwritten_rows,
    small_integers,
    step_cases,
    to_reference,
)

NUM_HEADS = 3
LATENT_DIM = 6
ROPE_DIM = 4
INDEX_HEADS = 2
INDEX_DIM = 4
SCALE = 0.37

CACHE_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
examples = settings(max_examples=150, deadline=None)


# ---- lightning_indexer


def index_inputs(case: StepCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, weights and key cache of small integers: exact scores, many of them equal."""
    generator = case.generator()
    q = small_integers((case.num_tokens, INDEX_HEADS, INDEX_DIM), generator, highest=2, dtype=dtype)
    weights = small_integers(
        (case.num_tokens, INDEX_HEADS), generator, highest=2, dtype=torch.float32
    )
    keys = small_integers(
        (case.num_blocks, case.block_size, INDEX_DIM), generator, highest=2, dtype=dtype
    )
    return (
        poison_padding_rows(case, q),
        poison_padding_rows(case, weights),
        poison_unwritten_rows(case, keys),
    )


@given(case=step_cases(), topk=st.integers(1, 20), dtype=CACHE_DTYPES)
@example(case=ONE_KEY, topk=1, dtype=torch.float32)
@example(case=ALL_PADDING, topk=2, dtype=torch.float32)
@example(case=NOTHING_AT_ALL, topk=2, dtype=torch.float32)
@example(case=EMPTY_AMONG_OTHERS, topk=3, dtype=torch.bfloat16)
@example(case=EMPTY_AMONG_OTHERS, topk=50, dtype=torch.float32)
@examples
def test_lightning_indexer_at_any_sizes_ranks_as_the_oracle(
    backend: Backend, case: StepCase, topk: int, dtype: torch.dtype
) -> None:
    q, weights, keys = index_inputs(case, dtype)
    plan = make_plan(case, backend.device)
    indices = backend.kernels.lightning_indexer(q, weights, keys, plan, topk)
    assert indices.dtype == torch.int32
    assert indices.shape == (case.num_tokens, topk)
    assert indices.is_contiguous()
    expected = reference_indexer.lightning_indexer(
        to_reference(q), to_reference(weights), to_reference(keys), case.requests, topk
    )
    assert indices.tolist() == expected


def one_request(*, query_len: int, key_len: int, block_size: int, seed: int = 0) -> StepCase:
    num_blocks = -(-key_len // block_size)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    return StepCase(
        requests=(PagedRequest(query_len=query_len, key_len=key_len, block_ids=tuple(order)),),
        num_padded_tokens=0,
        num_padded_requests=0,
        block_size=block_size,
        num_blocks=num_blocks,
        seed=seed,
    )


@pytest.mark.parametrize("topk", [1, 7, 39, 40, 41])
def test_lightning_indexer_with_all_scores_equal_takes_the_lowest_positions(
    backend: Backend, topk: int
) -> None:
    case = one_request(query_len=1, key_len=40, block_size=16)
    q = torch.ones(1, INDEX_HEADS, INDEX_DIM)
    keys = torch.ones(case.num_blocks, case.block_size, INDEX_DIM)
    indices = backend.kernels.lightning_indexer(
        q, torch.ones(1, INDEX_HEADS), keys, make_plan(case, backend.device), topk
    )
    assert indices[0].tolist() == [*range(min(topk, 40)), *[-1] * (topk - 40)]


def test_lightning_indexer_with_ties_across_the_cut_takes_the_lower_position(
    backend: Backend,
) -> None:
    case = one_request(query_len=1, key_len=6, block_size=3)
    scores = torch.tensor([1.0, 5.0, 1.0, 3.0, 1.0, 3.0])
    keys = torch.empty(case.num_blocks, case.block_size, 1)
    for position, score in enumerate(scores):
        keys[case.requests[0].block_ids[position // 3], position % 3] = score
    q, weights = torch.ones(1, 1, 1), torch.ones(1, 1)
    plan = make_plan(case, backend.device)
    assert backend.kernels.lightning_indexer(q, weights, keys, plan, 4).tolist() == [[1, 3, 5, 0]]
    assert backend.kernels.lightning_indexer(q, weights, keys, plan, 2).tolist() == [[1, 3]]


def test_lightning_indexer_with_negative_weights_prefers_the_keys_it_likes_least(
    backend: Backend,
) -> None:
    case = one_request(query_len=1, key_len=4, block_size=4)
    keys = torch.tensor([3.0, -1.0, 1.0, 2.0]).view(1, 4, 1)
    indices = backend.kernels.lightning_indexer(
        torch.ones(1, 1, 1), -torch.ones(1, 1), keys, make_plan(case, backend.device), 4
    )
    assert indices.tolist() == [[1, 2, 3, 0]]  # the negative dot product counts as 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lightning_indexer_on_continuous_scores_gives_up_no_more_than_rounding(
    backend: Backend, dtype: torch.dtype
) -> None:
    case = one_request(query_len=20, key_len=61, block_size=7, seed=3)
    generator, topk = case.generator(), 9
    q = normal((case.num_tokens, INDEX_HEADS, INDEX_DIM), generator, dtype)
    weights = normal((case.num_tokens, INDEX_HEADS), generator, torch.float32)
    keys = normal((case.num_blocks, case.block_size, INDEX_DIM), generator, dtype)
    indices = backend.kernels.lightning_indexer(
        q, weights, keys, make_plan(case, backend.device), topk
    )
    for row, chosen in enumerate(indices.tolist()):
        scores = reference_indexer.index_scores(
            to_reference(q[row]),
            to_reference(weights[row]),
            to_reference(keys),
            case.requests[0],
            row,
        )
        assert len(set(chosen)) == topk
        best = sorted(scores, reverse=True)[:topk]
        # fp32 sums of exact products, whatever the cache's dtype.
        np.testing.assert_allclose([scores[s] for s in chosen], best, rtol=1e-5, atol=1e-5)


def test_lightning_indexer_with_a_bf16_cache_sums_in_fp32(backend: Backend) -> None:
    case = one_request(query_len=1, key_len=2, block_size=2)
    # 256 + 1 is no bf16 number: summed in bf16 both keys would score 256 and position 0 win.
    keys = torch.tensor([[[256.0, 0.0], [256.0, 1.0]]], dtype=torch.bfloat16)
    q = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    indices = backend.kernels.lightning_indexer(
        q, torch.ones(1, 1), keys, make_plan(case, backend.device), 1
    )
    assert indices.tolist() == [[1]]


def test_lightning_indexer_with_topk_zero_raises(backend: Backend) -> None:
    q, weights, keys = index_inputs(ONE_KEY, torch.float32)
    plan = make_plan(ONE_KEY, backend.device)
    with pytest.raises(AttentionConfigError, match="topk is 0"):
        backend.kernels.lightning_indexer(q, weights, keys, plan, 0)


# ---- sparse_attention


def attention_inputs(case: StepCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator, pool = case.generator(), (case.num_blocks, case.block_size)
    return (
        poison_padding_rows(
            case, normal((case.num_tokens, NUM_HEADS, LATENT_DIM), generator, dtype)
        ),
        poison_padding_rows(case, normal((case.num_tokens, NUM_HEADS, ROPE_DIM), generator, dtype)),
        poison_unwritten_rows(case, normal((*pool, LATENT_DIM), generator, dtype)),
        poison_unwritten_rows(case, normal((*pool, ROPE_DIM), generator, dtype)),
    )


@st.composite
def step_cases_with_indices(draw: st.DrawFn) -> tuple[StepCase, list[list[int]]]:
    """Any positions, future ones too, any -1 in between; what follows a -1 is still a position."""
    case, width = draw(step_cases()), draw(st.integers(1, 12))
    positions = st.one_of(st.integers(0, 20), st.integers(0, 3), st.just(-1))
    row = st.one_of(
        st.lists(positions, min_size=width, max_size=width),
        st.permutations(range(width)),
        st.just([-1] * width),
    )
    return case, [list(draw(row)) for _ in range(case.num_tokens)]


@given(case_and_indices=step_cases_with_indices(), dtype=CACHE_DTYPES)
@example(case_and_indices=(ONE_KEY, [[0]]), dtype=torch.float32)
@example(case_and_indices=(ALL_PADDING, [[0, 1]] * 3), dtype=torch.float32)
@example(case_and_indices=(NOTHING_AT_ALL, [[0, 1]] * 3), dtype=torch.float32)
@example(
    case_and_indices=(EMPTY_AMONG_OTHERS, [[4, 0, 8, 1, -1, 2]] * EMPTY_AMONG_OTHERS.num_tokens),
    dtype=torch.bfloat16,
)
@examples
def test_sparse_attention_at_any_sizes_equals_the_oracle(
    backend: Backend, case_and_indices: tuple[StepCase, list[list[int]]], dtype: torch.dtype
) -> None:
    case, indices = case_and_indices
    width = len(indices[0]) if indices else 1
    q_latent, q_rope, latent, rope = attention_inputs(case, dtype)
    out = backend.kernels.sparse_attention(
        q_latent,
        q_rope,
        latent,
        rope,
        torch.tensor(indices, dtype=torch.int32).view(case.num_tokens, width),
        plan=make_plan(case, backend.device),
        scale=SCALE,
    )
    assert out.dtype == dtype
    expected = reference_attention.sparse_attention(
        to_reference(q_latent),
        to_reference(q_rope),
        to_reference(latent),
        to_reference(rope),
        indices=indices,
        requests=case.requests,
        scale=SCALE,
    )
    assert_same_but_for_rounding(out, expected, dtype)
    assert not out[case.num_queries :].any()


def attend(
    backend: Backend, case: StepCase, indices: list[list[int]], dtype: torch.dtype = torch.float32
) -> Tensor:
    q_latent, q_rope, latent, rope = attention_inputs(case, dtype)
    return backend.kernels.sparse_attention(
        q_latent,
        q_rope,
        latent,
        rope,
        torch.tensor(indices, dtype=torch.int32),
        plan=make_plan(case, backend.device),
        scale=SCALE,
    )


def test_sparse_attention_with_a_hole_ignores_what_stands_behind_it(backend: Backend) -> None:
    case = one_request(query_len=1, key_len=9, block_size=4)
    with_tail = attend(backend, case, [[7, 2, -1, 5, 0]])
    without_tail = attend(backend, case, [[7, 2, -1, -1, -1]])
    without_hole = attend(backend, case, [[7, 2, 5, 0, -1]])
    assert torch.equal(with_tail, without_tail)
    assert not torch.allclose(with_tail, without_hole)


def test_sparse_attention_with_future_positions_drops_them(backend: Backend) -> None:
    case = one_request(query_len=2, key_len=6, block_size=4)
    # Row 0 sees keys 0..4: 5 is in its future and 9 does not exist.
    with_future = attend(backend, case, [[5, 3, 9, 1], [5, 3, 9, 1]])
    without = attend(backend, case, [[3, 1, -1, -1], [5, 3, 1, -1]])
    torch.testing.assert_close(with_future, without, rtol=1e-6, atol=1e-6)


def test_sparse_attention_with_a_repeated_position_counts_it_twice(backend: Backend) -> None:
    case = one_request(query_len=1, key_len=6, block_size=4)
    twice = attend(backend, case, [[3, 3, 1]])
    assert not torch.allclose(twice, attend(backend, case, [[3, 1, -1]]))
    q_latent, q_rope, latent, rope = (
        to_reference(tensor) for tensor in attention_inputs(case, torch.float32)
    )
    expected = reference_attention.sparse_attention(
        q_latent,
        q_rope,
        latent,
        rope,
        indices=[[3, 3, 1]],
        requests=case.requests,
        scale=SCALE,
    )
    assert_same_but_for_rounding(twice, expected, torch.float32)


@given(case=step_cases(), seed=st.integers(0, 1000))
@examples
def test_sparse_attention_with_valid_indices_reordered_is_the_same(
    backend: Backend, case: StepCase, seed: int
) -> None:
    width = 20
    shuffle = np.random.default_rng(seed)
    ordered, shuffled = [], []
    for request in case.requests:
        for query in range(request.query_len):
            positions = list(range(request.num_visible(query)))
            padding = [-1] * (width - len(positions))
            ordered.append(positions + padding)
            shuffled.append([*shuffle.permutation(positions).tolist(), *padding])
    padded = [[-1] * width] * case.num_padded_tokens
    if not ordered + padded:
        return
    torch.testing.assert_close(
        attend(backend, case, [[int(i) for i in row] for row in shuffled + padded]),
        attend(backend, case, ordered + padded),
        rtol=1e-5,
        atol=1e-5,
    )


def test_sparse_attention_with_huge_logits_does_not_overflow(backend: Backend) -> None:
    case = one_request(query_len=1, key_len=3, block_size=2)
    q_latent, q_rope, latent, rope = attention_inputs(case, torch.float32)
    out = backend.kernels.sparse_attention(
        q_latent * 1e4,
        q_rope,
        latent,
        rope,
        torch.tensor([[0, 1, 2]], dtype=torch.int32),
        plan=make_plan(case, backend.device),
        scale=1.0,
    )
    assert out.isfinite().all()


def test_sparse_attention_with_a_bf16_cache_sums_in_fp32(backend: Backend) -> None:
    num_keys = 512
    case = one_request(query_len=1, key_len=num_keys, block_size=16)
    pool = (case.num_blocks, case.block_size)
    latent = torch.full((*pool, LATENT_DIM), 1.0, dtype=torch.bfloat16)
    out = backend.kernels.sparse_attention(
        torch.zeros(1, NUM_HEADS, LATENT_DIM, dtype=torch.bfloat16),
        torch.zeros(1, NUM_HEADS, ROPE_DIM, dtype=torch.bfloat16),
        latent,
        torch.zeros(*pool, ROPE_DIM, dtype=torch.bfloat16),
        torch.arange(num_keys, dtype=torch.int32)[None],
        plan=make_plan(case, backend.device),
        scale=SCALE,
    )
    # A sum of 512 probabilities of 1/512 in bf16 stops growing at 0.5.
    assert torch.equal(out, torch.ones_like(out))


# ---- both


def with_stale_host(plan: AttentionPlan) -> AttentionPlan:
    """As in a replayed step: the tensors were refreshed, the ints were not."""
    return dataclasses.replace(plan, host=HostLens(query_lens=(1,), key_lens=(1,)))


def test_operators_with_stale_host_lengths_follow_the_plans_tensors(backend: Backend) -> None:
    case = EMPTY_AMONG_OTHERS
    plan = make_plan(case, backend.device)
    q, weights, keys = index_inputs(case, torch.float32)
    attention = attention_inputs(case, torch.float32)
    indices = backend.kernels.lightning_indexer(q, weights, keys, plan, 3)
    out = backend.kernels.sparse_attention(*attention, indices, plan=plan, scale=SCALE)
    stale = with_stale_host(plan)
    assert torch.equal(backend.kernels.lightning_indexer(q, weights, keys, stale, 3), indices)
    assert torch.equal(
        backend.kernels.sparse_attention(*attention, indices, plan=stale, scale=SCALE), out
    )


def test_operators_leave_their_inputs_as_they_were(backend: Backend) -> None:
    case = EMPTY_AMONG_OTHERS
    plan = make_plan(case, backend.device)
    index, attention = index_inputs(case, torch.float32), attention_inputs(case, torch.float32)
    given_tensors = (*index, *attention, plan.cum_query_lens, plan.key_lens, plan.block_table)
    before = [tensor.clone() for tensor in given_tensors]
    indices = backend.kernels.lightning_indexer(*index, plan, 3)
    chosen = indices.clone()
    backend.kernels.sparse_attention(*attention, indices, plan=plan, scale=SCALE)
    assert torch.equal(indices, chosen)
    for tensor, copy in zip(given_tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
