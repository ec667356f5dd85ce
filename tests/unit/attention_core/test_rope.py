"""Rope tables equal those of the transformers package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

from attention_core.errors import AttentionConfigError
from attention_core.rope import YarnScaling, build_rope_table, yarn_mscale

HEAD_DIM = 64
NUM_POSITIONS = 300

YARN_CASES: Mapping[str, Mapping[str, Any]] = {
    "released": {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "mscales_differ": {"mscale": 1.3, "mscale_all_dim": 0.7},
    "only_mscale": {"mscale": 0.7},
    "mscale_zero": {"mscale": 0.0, "mscale_all_dim": 1.0},
    "attention_factor": {"attention_factor": 1.7, "mscale": 1.0, "mscale_all_dim": 1.0},
    "not_truncated": {"truncate": False},
    "odd_betas": {"beta_fast": 20.5, "beta_slow": 2.5},
    "ramp_without_slope": {"beta_fast": 1e9, "beta_slow": 1e8},
    "shrinks": {"factor": 0.5},
}


def oracle(rope_parameters: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    config = DeepseekV32Config(
        qk_rope_head_dim=HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096 * 4,
        rope_parameters=dict(rope_parameters),
    )
    positions = torch.arange(NUM_POSITIONS)[None]
    cos, sin = DeepseekV32RotaryEmbedding(config)(torch.ones(1), positions)
    return cos[0], sin[0]


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_build_rope_table_without_scaling_equals_transformers(theta: float) -> None:
    table = build_rope_table(HEAD_DIM, NUM_POSITIONS, theta, None)
    cos, sin = oracle({"rope_type": "default", "rope_theta": theta})
    assert table.cos.dtype == torch.float32
    assert torch.equal(table.cos, cos)
    assert torch.equal(table.sin, sin)


@pytest.mark.parametrize("case", YARN_CASES)
def test_build_rope_table_with_yarn_equals_transformers(case: str) -> None:
    given: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 4096}
    given |= YARN_CASES[case]
    table = build_rope_table(HEAD_DIM, NUM_POSITIONS, 10_000.0, YarnScaling(**given))
    cos, sin = oracle({"rope_type": "yarn", "rope_theta": 10_000.0, **given})
    torch.testing.assert_close(table.cos, cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(table.sin, sin, rtol=1e-6, atol=1e-6)
    plain = build_rope_table(HEAD_DIM, NUM_POSITIONS, 10_000.0, None)
    assert not torch.allclose(table.cos, plain.cos)


def test_build_rope_table_tiles_the_frequencies_twice() -> None:
    table = build_rope_table(8, 5, 100.0, None)
    assert table.max_positions == 5
    assert torch.equal(table.cos[:, :4], table.cos[:, 4:])
    assert torch.equal(table.sin[:, :4], table.sin[:, 4:])


def test_yarn_mscale_without_extension_is_one() -> None:
    assert yarn_mscale(1.0, 3.0) == 1.0
    assert yarn_mscale(0.5, 3.0) == 1.0
    assert yarn_mscale(2.718281828459045, 1.0) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("field", "head_dim", "max_positions", "theta"),
    [
        ("head_dim", 0, 4, 10.0),
        ("head_dim", 5, 4, 10.0),
        ("max_positions", 4, 0, 10.0),
        ("rope_theta", 4, 4, 1.0),
    ],
)
def test_build_rope_table_with_an_impossible_argument_names_it(
    field: str, head_dim: int, max_positions: int, theta: float
) -> None:
    with pytest.raises(AttentionConfigError) as caught:
        build_rope_table(head_dim, max_positions, theta, None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "factor", "original"),
    [("factor", 0.0, 4), ("original_max_position_embeddings", 2.0, 0)],
)
def test_build_rope_table_with_impossible_scaling_names_it(
    field: str, factor: float, original: int
) -> None:
    scaling = YarnScaling(factor=factor, original_max_position_embeddings=original)
    with pytest.raises(AttentionConfigError) as caught:
        build_rope_table(4, 4, 10.0, scaling)
    assert caught.value.field == f"rope_scaling.{field}"
