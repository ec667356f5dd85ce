"""The float64 layer oracle, fed with the product's shapes and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.rope import RopeTable
from attention_core.shape import AttentionShape, RopeStyle
from attention_core.weights import NativeWeights
from tests.reference import attention_layer
from tests.reference.attention_layer import LayerArrays, LayerSizes
from tests.reference.paging import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleOutput:
    """The oracle's answer for one sequence.

    Attributes:
        hidden: fp32 [T, D].
        choices: T rows of K positions, best first, then -1.
    """

    hidden: Tensor
    choices: list[list[int]]


def layer_oracle(
    hidden: Tensor,
    weights: NativeWeights,
    kv_b_proj: Tensor,
    shape: AttentionShape,
    rope: RopeTable,
    *,
    choices: list[list[int]] | None = None,
) -> OracleOutput:
    """Run one whole sequence.

    Args:
        hidden: [T, D].
        weights: With an indexer, whose choice is not used where choices are given.
        kv_b_proj: [H*(P+V), L], the joint up-projection the weights were made from.
        shape: Sizes.
        rope: Table of angles.
        choices: Keys to attend to instead of the layer's own choice.
    """
    arrays, sizes = _arrays(weights, kv_b_proj), _sizes(shape)
    rows = _array(hidden)
    cos, sin = (_array(table[: len(rows)]) for table in (rope.cos, rope.sin))
    if choices is None:
        choices = attention_layer.chosen_keys(rows, cos, sin, arrays, sizes)
    out = attention_layer.attend(rows, cos, sin, arrays, sizes, choices=choices)
    return OracleOutput(hidden=torch.from_numpy(out).float(), choices=choices)


def _array(tensor: Tensor) -> Array:
    values: Array = tensor.double().numpy()
    return values


def _sizes(shape: AttentionShape) -> LayerSizes:
    return LayerSizes(
        num_heads=shape.num_heads,
        nope_dim=shape.qk_nope_head_dim,
        rope_dim=shape.qk_rope_head_dim,
        value_dim=shape.v_head_dim,
        latent_dim=shape.kv_lora_rank,
        num_index_heads=shape.indexer.num_heads,
        topk=shape.indexer.topk,
        scale=shape.softmax_scale,
        eps=shape.norm_eps,
        index_eps=shape.indexer.norm_eps,
        is_index_rope_interleaved=shape.indexer.rope_style is RopeStyle.INTERLEAVED,
    )


def _arrays(weights: NativeWeights, kv_b_proj: Tensor) -> LayerArrays:
    indexer = weights.indexer
    assert indexer is not None
    return LayerArrays(
        q_a_proj=_array(weights.q_a_proj),
        q_a_layernorm=_array(weights.q_a_norm),
        q_b_proj=_array(weights.q_b_proj),
        kv_a_proj_with_mqa=_array(weights.kv_a_proj),
        kv_a_layernorm=_array(weights.kv_a_norm),
        kv_b_proj=_array(kv_b_proj),
        o_proj=_array(weights.o_proj),
        wq_b=_array(indexer.wq_b),
        wk=_array(indexer.wk),
        k_norm_weight=_array(indexer.k_norm_weight),
        k_norm_bias=_array(indexer.k_norm_bias),
        weights_proj=_array(indexer.weights_proj),
    )
