"""Small attention layers with random weights, and caches for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_core.paged_kv import LayerKv, PagedKvCache, layer_components
from attention_core.rope import RopeTable, build_rope_table
from attention_core.shape import AttentionShape, IndexerShape, RopeStyle
from attention_core.weights import IndexerWeights, NativeWeights, split_kv_b

MAX_POSITIONS = 256


def small_shape(
    *, topk: int = 8, rope_style: RopeStyle = RopeStyle.HALF_SPLIT, num_index_heads: int = 8
) -> AttentionShape:
    """A shape whose every size differs where sizes can, so that a mix-up shows."""
    return AttentionShape(
        hidden_size=24,
        num_heads=3,
        q_lora_rank=14,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=7,
        softmax_scale=10**-0.5,
        norm_eps=1e-6,
        indexer=IndexerShape(
            num_heads=num_index_heads,
            head_dim=9,
            rope_head_dim=4,
            topk=topk,
            rope_style=rope_style,
        ),
    )


def random_kv_b_proj(shape: AttentionShape, *, seed: int) -> Tensor:
    """The joint up-projection [H*(P+V), L] that random_weights splits for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return torch.randn(rows, shape.kv_lora_rank, generator=generator) * shape.kv_lora_rank**-0.5


def random_weights(shape: AttentionShape, *, seed: int, has_indexer: bool = True) -> NativeWeights:
    """fp32 weights that keep activations near unit size."""
    generator = torch.Generator().manual_seed(seed + 1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.3 * columns**-0.5

    def gain(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    index = shape.indexer
    w_uk_t, w_uv = split_kv_b(random_kv_b_proj(shape, seed=seed), shape)
    return NativeWeights(
        q_a_proj=matrix(shape.q_lora_rank, shape.hidden_size),
        q_a_norm=gain(shape.q_lora_rank),
        q_b_proj=matrix(shape.num_heads * shape.qk_head_dim, shape.q_lora_rank),
        kv_a_proj=matrix(shape.kv_lora_rank + shape.qk_rope_head_dim, shape.hidden_size),
        kv_a_norm=gain(shape.kv_lora_rank),
        w_uk_t=w_uk_t,
        w_uv=w_uv,
        o_proj=matrix(shape.hidden_size, shape.num_heads * shape.v_head_dim),
        indexer=IndexerWeights(
            wq_b=matrix(index.num_heads * index.head_dim, shape.q_lora_rank),
            wk=matrix(index.head_dim, shape.hidden_size),
            k_norm_weight=gain(index.head_dim),
            k_norm_bias=0.2 * torch.randn(index.head_dim, generator=generator),
            weights_proj=matrix(index.num_heads, shape.hidden_size),
        )
        if has_indexer
        else None,
    )


def random_hidden(shape: AttentionShape, num_tokens: int, *, seed: int) -> Tensor:
    """Layer input fp32 [num_tokens, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, shape.hidden_size, generator=generator)


def poisoned_kv(
    shape: AttentionShape,
    *,
    num_blocks: int,
    block_size: int,
    has_indexer: bool = True,
    dtype: torch.dtype = torch.float32,
) -> LayerKv:
    """A layer's cache full of NaN: a row that was never written must not matter."""
    components = layer_components(shape, dtype=dtype, has_indexer=has_indexer)
    cache = PagedKvCache.allocate([components], num_blocks=num_blocks, block_size=block_size)
    for component in components:
        cache.tensor(0, component.name).fill_(torch.nan)
    return cache.layers[0]


def small_rope(shape: AttentionShape) -> RopeTable:
    """A plain table for the shape."""
    return build_rope_table(shape.qk_rope_head_dim, MAX_POSITIONS, 10_000.0, None)


def shuffled_blocks(num_blocks: int, *, seed: int) -> Sequence[int]:
    """Every block once, in an order that is not the pool's."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
    return order
