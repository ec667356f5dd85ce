"""One sparse-attention layer over one whole sequence, in the textbook form.

Keys and values of each head are expanded from the latents; nothing is absorbed, paged or chunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.kv_write import layer_norm, rms_norm
from tests.reference.lightning_indexer import choose, index_score
from tests.reference.paging import Array
from tests.reference.rope import rope_half, rope_interleaved
from tests.reference.sparse_attention import softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes and constants of the layer.

    Attributes:
        num_heads: H.
        nope_dim: P.
        rope_dim: R, of the main heads and of the index heads.
        value_dim: V.
        latent_dim: L.
        num_index_heads: Hi.
        topk: K.
        scale: Softmax scale.
        eps: Of the two RMSNorms.
        index_eps: Of the index keys' LayerNorm.
        is_index_rope_interleaved: Whether pairs (2c, 2c+1) turn in the indexer, or (c, c + R/2).
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    num_index_heads: int
    topk: int
    scale: float
    eps: float
    index_eps: float
    is_index_rope_interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrays:
    """Weights under the names a checkpoint gives them, [out, in] each; norms [n]."""

    q_a_proj: Array
    q_a_layernorm: Array
    q_b_proj: Array
    kv_a_proj_with_mqa: Array
    kv_a_layernorm: Array
    kv_b_proj: Array
    o_proj: Array
    wq_b: Array
    wk: Array
    k_norm_weight: Array
    k_norm_bias: Array
    weights_proj: Array


def query_latents(hidden: Array, weights: LayerArrays, sizes: LayerSizes) -> Array:
    """Normed query latents [T, Q] of hidden [T, D]."""
    return np.array(
        [rms_norm(weights.q_a_proj @ row, weights.q_a_layernorm, sizes.eps) for row in hidden]
    )


def chosen_keys(
    hidden: Array, cos: Array, sin: Array, weights: LayerArrays, sizes: LayerSizes
) -> list[list[int]]:
    """The indexer's choice for each token of the sequence: K positions, then -1.

    Args:
        hidden: [T, D].
        cos: [T, R/2 at least], angle of each pair; sin alike.
        sin: See cos.
        weights: The layer's weights.
        sizes: The layer's sizes.
    """
    turn = rope_interleaved if sizes.is_index_rope_interleaved else rope_half

    def rotated(head: Array, token: int) -> Array:
        front = turn(head[: sizes.rope_dim], cos[token], sin[token])
        return np.concatenate((front, head[sizes.rope_dim :]))

    keys = []
    for token, row in enumerate(hidden):
        key = layer_norm(
            weights.wk @ row, weights.k_norm_weight, weights.k_norm_bias, sizes.index_eps
        )
        keys.append(rotated(key, token))
    choices = []
    for token, q_latent in enumerate(query_latents(hidden, weights, sizes)):
        heads = (weights.wq_b @ q_latent).reshape(sizes.num_index_heads, -1)
        query = np.array([rotated(head, token) for head in heads])
        per_head = weights.weights_proj @ hidden[token] * sizes.num_index_heads**-0.5
        dim_scale = heads.shape[1] ** -0.5
        scores = [dim_scale * index_score(query, per_head, key) for key in keys[: token + 1]]
        choices.append(choose(scores, sizes.topk))
    return choices


def attend(
    hidden: Array,
    cos: Array,
    sin: Array,
    weights: LayerArrays,
    sizes: LayerSizes,
    *,
    choices: Sequence[Sequence[int]],
) -> Array:
    """Attention output [T, D], each token over its chosen keys; arguments as above."""
    latents, ropes = [], []
    for token, row in enumerate(hidden):
        kv = weights.kv_a_proj_with_mqa @ row
        latents.append(rms_norm(kv[: sizes.latent_dim], weights.kv_a_layernorm, sizes.eps))
        ropes.append(rope_interleaved(kv[sizes.latent_dim :], cos[token], sin[token]))
    expanded = np.array([weights.kv_b_proj @ latent for latent in latents]).reshape(
        len(latents), sizes.num_heads, sizes.nope_dim + sizes.value_dim
    )
    out = []
    for token, q_latent in enumerate(query_latents(hidden, weights, sizes)):
        queries = (weights.q_b_proj @ q_latent).reshape(sizes.num_heads, -1)
        kept = [position for position in choices[token] if position >= 0]
        values = np.zeros((sizes.num_heads, sizes.value_dim))
        for head, query in enumerate(queries):
            turned = rope_interleaved(query[sizes.nope_dim :], cos[token], sin[token])
            logits = [
                sizes.scale
                * float(
                    query[: sizes.nope_dim] @ expanded[position, head, : sizes.nope_dim]
                    + turned @ ropes[position]
                )
                for position in kept
            ]
            for probability, position in zip(softmax(logits), kept, strict=True):
                values[head] += probability * expanded[position, head, sizes.nope_dim :]
        out.append(weights.o_proj @ values.flatten())
    return np.array(out)
