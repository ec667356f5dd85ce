"""What every backend's cache writes, rotations, norms and products promise, against the oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import kv_write as reference_write
from tests.reference import rope as reference_rope
from tests.support.kernel_cases import (
    ALL_PADDING,
    ONE_KEY,
    Backend,
    StepCase,
    assert_same_but_for_rounding,
    make_plan,
    normal,
    poison_padding_rows,
    step_cases,
    to_reference,
)

NUM_HEADS = 3
LATENT_DIM = 6
ROPE_DIM = 4
EPS = 1e-6

CACHE_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
examples = settings(max_examples=150, deadline=None)


# ---- cache writes


@st.composite
def writes(draw: st.DrawFn) -> tuple[StepCase, list[int]]:
    """A step and where its tokens go: unique slots, or nowhere."""
    case = draw(step_cases())
    num_slots = case.num_blocks * case.block_size
    order = draw(st.permutations(range(num_slots)))
    slots = [
        -1 if token >= min(case.num_queries, num_slots) or draw(st.booleans()) else order[token]
        for token in range(case.num_tokens)
    ]
    return case, slots


def rotation(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """cos and sin fp32 [T, R], the angles tiled twice."""
    angles = torch.rand(num_tokens, ROPE_DIM // 2, generator=generator) * 50
    tiled = torch.cat((angles, angles), dim=-1)
    return tiled.cos(), tiled.sin()


@given(write=writes(), dtype=CACHE_DTYPES)
@example(write=(ALL_PADDING, [-1, -1, -1]), dtype=torch.float32)
@example(write=(ONE_KEY, [11]), dtype=torch.bfloat16)
@examples
def test_kv_rmsnorm_rope_cache_at_any_slots_writes_the_oracles_rows_and_no_others(
    backend: Backend, write: tuple[StepCase, list[int]], dtype: torch.dtype
) -> None:
    case, slots = write
    generator = case.generator()
    kv = normal((case.num_tokens, LATENT_DIM + ROPE_DIM), generator, dtype)
    gamma = normal((LATENT_DIM,), generator, dtype)
    cos, sin = rotation(case.num_tokens, generator)
    kv = poison_padding_rows(case, kv)
    pool = (case.num_blocks, case.block_size)
    rope_cache = torch.full((*pool, ROPE_DIM), torch.nan, dtype=dtype)
    latent_cache = torch.full((*pool, LATENT_DIM), torch.nan, dtype=dtype)
    expected_rope, expected_latent = reference_write.kv_rmsnorm_rope_cache(
        to_reference(kv),
        to_reference(gamma),
        cos=to_reference(cos),
        sin=to_reference(sin),
        slots=slots,
        rope_cache=to_reference(rope_cache),
        latent_cache=to_reference(latent_cache),
        eps=EPS,
    )
    backend.kernels.kv_rmsnorm_rope_cache(
        kv,
        gamma,
        eps=EPS,
        plan=make_plan(case, backend.device, slots=slots, cos=cos, sin=sin),
        rope_cache=rope_cache,
        latent_cache=latent_cache,
    )
    # NaN equals NaN here: rows that no slot names are still poison.
    assert_same_but_for_rounding(rope_cache, expected_rope, dtype)
    assert_same_but_for_rounding(latent_cache, expected_latent, dtype)


@given(write=writes(), dtype=CACHE_DTYPES)
@examples
def test_scatter_rows_at_any_slots_writes_those_rows_and_no_others(
    backend: Backend, write: tuple[StepCase, list[int]], dtype: torch.dtype
) -> None:
    case, slots = write
    generator = case.generator()
    rows = poison_padding_rows(case, normal((case.num_tokens, 5), generator, torch.float32))
    cache = normal((case.num_blocks, case.block_size, 5), generator, dtype)
    expected = reference_write.scatter_rows(
        to_reference(cache), slots, to_reference(rows.to(dtype))
    )
    backend.kernels.scatter_rows(cache, torch.tensor(slots, dtype=torch.int64), rows)
    np.testing.assert_array_equal(to_reference(cache), expected)


def test_scatter_rows_with_slot_minus_one_leaves_the_last_row_alone(backend: Backend) -> None:
    cache = torch.zeros(2, 3, 1)
    backend.kernels.scatter_rows(cache, torch.tensor([-1, 4]), torch.tensor([[9.0], [7.0]]))
    assert cache.flatten().tolist() == [0, 0, 0, 0, 7, 0]


# ---- rotations, norms, products

ROPES = ["rope_half", "rope_interleaved", "rope_interleaved_to_half"]


@pytest.mark.parametrize("operator", ROPES)
@pytest.mark.parametrize("num_heads", [None, 1, NUM_HEADS])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_at_any_sizes_turns_pairs_as_the_oracle(
    backend: Backend, operator: str, num_heads: int | None, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    heads = () if num_heads is None else (num_heads,)
    x = normal((num_tokens, *heads, ROPE_DIM), generator, dtype)
    cos, sin = rotation(num_tokens, generator)
    out = getattr(backend.kernels, operator)(x, cos, sin)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    turn = getattr(reference_rope, operator)
    expected = np.zeros(x.shape)
    for token in range(num_tokens):
        for head in np.ndindex(heads):
            expected[token][head] = turn(
                to_reference(x)[token][head], to_reference(cos)[token], to_reference(sin)[token]
            )
    assert_same_but_for_rounding(out, expected, dtype)


@pytest.mark.parametrize("operator", ROPES)
def test_rope_with_nan_in_another_token_stays_finite(backend: Backend, operator: str) -> None:
    x = torch.ones(2, NUM_HEADS, ROPE_DIM)
    x[1] = torch.nan
    cos, sin = rotation(2, torch.Generator().manual_seed(0))
    assert getattr(backend.kernels, operator)(x, cos, sin)[0].isfinite().all()


def test_rope_half_of_permuted_channels_equals_rope_interleaved_to_half(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    x = normal((5, NUM_HEADS, ROPE_DIM), generator, torch.float32)
    cos, sin = rotation(5, generator)
    even_first = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    assert torch.equal(
        backend.kernels.rope_half(even_first, cos, sin),
        backend.kernels.rope_interleaved_to_half(x, cos, sin),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_at_any_sizes_equal_the_oracle(
    backend: Backend, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = normal((num_tokens, 7), generator, dtype) + 2
    weight, bias = normal((7,), generator, dtype), normal((7,), generator, dtype)
    rms = backend.kernels.rms_norm(x, weight, EPS)
    layer = backend.kernels.layer_norm(x, weight, bias, EPS)
    assert (rms.dtype, layer.dtype) == (dtype, dtype)
    wide, gamma, beta = to_reference(x), to_reference(weight), to_reference(bias)
    expected_rms = [reference_write.rms_norm(row, gamma, EPS) for row in wide]
    expected_layer = [reference_write.layer_norm(row, gamma, beta, EPS) for row in wide]
    assert_same_but_for_rounding(rms, np.array(expected_rms).reshape(x.shape), dtype)
    assert_same_but_for_rounding(layer, np.array(expected_layer).reshape(x.shape), dtype)


def test_rms_norm_of_large_fp16_values_squares_in_fp32(backend: Backend) -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # the square is no fp16 number
    ones = torch.ones(4, dtype=torch.float16)
    assert torch.equal(backend.kernels.rms_norm(x, ones, EPS), torch.ones_like(x))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_batch_matmul_transpose_multiplies_each_head_by_its_own_matrix(
    backend: Backend, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    a = normal((num_tokens, NUM_HEADS, 5), generator, torch.float32)
    b = normal((NUM_HEADS, 5, 4), generator, torch.float32)
    out = backend.kernels.batch_matmul_transpose(a, b)
    assert out.shape == (num_tokens, NUM_HEADS, 4)
    expected = np.zeros(out.shape)
    for token, head in np.ndindex(num_tokens, NUM_HEADS):
        expected[token, head] = to_reference(a)[token, head] @ to_reference(b)[head]
    assert_same_but_for_rounding(out, expected, torch.float32)
