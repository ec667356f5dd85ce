"""Weights of one attention layer, complete and immutable from load on. Letters: shape.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.errors import AttentionConfigError
from attention_core.shape import AttentionShape, IndexerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """Indexer weights of a layer that chooses its own keys.

    Attributes:
        wq_b: [Hi*Di, Q], applied to the normed query latent; rotary channels first in each head.
        wk: [Di, D].
        k_norm_weight: [Di], of a LayerNorm.
        k_norm_bias: [Di].
        weights_proj: [Hi, D], gives each index head its weight.
    """

    wq_b: Tensor
    wk: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor

    def validate(self, shape: IndexerShape, *, hidden_size: int, q_lora_rank: int) -> None:
        """Compare every tensor with the sizes.

        Raises:
            AttentionConfigError: A tensor has another shape; names it.
        """
        _require("indexer.wq_b", self.wq_b, (shape.num_heads * shape.head_dim, q_lora_rank))
        _require("indexer.wk", self.wk, (shape.head_dim, hidden_size))
        _require("indexer.k_norm_weight", self.k_norm_weight, (shape.head_dim,))
        _require("indexer.k_norm_bias", self.k_norm_bias, (shape.head_dim,))
        _require("indexer.weights_proj", self.weights_proj, (shape.num_heads, hidden_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """Floating-point weights of one layer, in the form the absorbed attention needs.

    Attributes:
        q_a_proj: [Q, D].
        q_a_norm: [Q].
        q_b_proj: [H*(P+R), Q], per head the channels without position first.
        kv_a_proj: [L+R, D], the latent first.
        kv_a_norm: [L].
        w_uk_t: [H, P, L], carries a query head into latent space.
        w_uv: [H, L, V], carries an attended latent into value space.
        o_proj: [D, H*V].
        indexer: None in a layer that reuses the choice of an earlier one.
    """

    q_a_proj: Tensor
    q_a_norm: Tensor
    q_b_proj: Tensor
    kv_a_proj: Tensor
    kv_a_norm: Tensor
    w_uk_t: Tensor
    w_uv: Tensor
    o_proj: Tensor
    indexer: IndexerWeights | None

    def validate(self, shape: AttentionShape) -> None:
        """Compare every tensor with the sizes.

        Raises:
            AttentionConfigError: A tensor has another shape; names it.
        """
        heads, latent = shape.num_heads, shape.kv_lora_rank
        _require("q_a_proj", self.q_a_proj, (shape.q_lora_rank, shape.hidden_size))
        _require("q_a_norm", self.q_a_norm, (shape.q_lora_rank,))
        _require("q_b_proj", self.q_b_proj, (heads * shape.qk_head_dim, shape.q_lora_rank))
        _require("kv_a_proj", self.kv_a_proj, (latent + shape.qk_rope_head_dim, shape.hidden_size))
        _require("kv_a_norm", self.kv_a_norm, (latent,))
        _require("w_uk_t", self.w_uk_t, (heads, shape.qk_nope_head_dim, latent))
        _require("w_uv", self.w_uv, (heads, latent, shape.v_head_dim))
        _require("o_proj", self.o_proj, (shape.hidden_size, heads * shape.v_head_dim))
        if self.indexer is not None:
            self.indexer.validate(
                shape.indexer, hidden_size=shape.hidden_size, q_lora_rank=shape.q_lora_rank
            )


def split_kv_b(kv_b_proj: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Split the checkpoint's joint up-projection into the two absorbed halves.

    Args:
        kv_b_proj: [H*(P+V), L], per head the key channels first, then the value channels.
        shape: Sizes.

    Returns:
        w_uk_t [H, P, L] and w_uv [H, L, V], both contiguous, both copies.

    Raises:
        AttentionConfigError: kv_b_proj has another shape.
    """
    key, value = shape.qk_nope_head_dim, shape.v_head_dim
    _require("kv_b_proj", kv_b_proj, (shape.num_heads * (key + value), shape.kv_lora_rank))
    per_head = kv_b_proj.view(shape.num_heads, key + value, shape.kv_lora_rank)
    w_uk_t = per_head[:, :key].clone(memory_format=torch.contiguous_format)
    w_uv = per_head[:, key:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return w_uk_t, w_uv


def _require(field: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise AttentionConfigError(field, tuple(tensor.shape), f"of shape {expected}")
