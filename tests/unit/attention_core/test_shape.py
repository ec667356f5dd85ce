"""Sizes that cannot work are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_core.errors import AttentionConfigError, AttentionError
from attention_core.shape import AttentionShape, IndexerShape, RopeStyle

INDEXER = IndexerShape(
    num_heads=8, head_dim=32, rope_head_dim=16, topk=64, rope_style=RopeStyle.HALF_SPLIT
)
SHAPE = AttentionShape(
    hidden_size=128,
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    softmax_scale=48**-0.5,
    norm_eps=1e-6,
    indexer=INDEXER,
)


def test_attention_shape_qk_head_dim_joins_both_parts() -> None:
    assert SHAPE.qk_head_dim == 48


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("num_heads", 0),
        ("q_lora_rank", -1),
        ("kv_lora_rank", 0),
        ("qk_nope_head_dim", 0),
        ("qk_rope_head_dim", 15),
        ("v_head_dim", 0),
        ("softmax_scale", 0.0),
        ("softmax_scale", float("inf")),
        ("softmax_scale", float("nan")),
        ("norm_eps", 0.0),
    ],
)
def test_attention_shape_with_an_impossible_size_names_it(field: str, value: Any) -> None:
    with pytest.raises(AttentionConfigError) as caught:
        replace(SHAPE, **{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert isinstance(caught.value, AttentionError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("head_dim", 0),
        ("rope_head_dim", 3),
        ("rope_head_dim", 34),
        ("topk", 0),
        ("norm_eps", 0.0),
    ],
)
def test_indexer_shape_with_an_impossible_size_names_it(field: str, value: Any) -> None:
    with pytest.raises(AttentionConfigError) as caught:
        replace(INDEXER, **{field: value})
    assert caught.value.field == f"indexer.{field}"


def test_attention_shape_with_two_rope_widths_is_refused() -> None:
    with pytest.raises(AttentionConfigError, match="qk_rope_head_dim 16"):
        replace(SHAPE, indexer=replace(INDEXER, rope_head_dim=8))
