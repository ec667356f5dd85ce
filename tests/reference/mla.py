"""Dense causal latent attention of one sequence, absorbed and expanded."""

from __future__ import annotations

import numpy as np

from tests.reference.paging import Array
from tests.reference.sparse_attention import softmax


def dense_causal_absorbed(
    q_latent: Array, q_rope: Array, latent: Array, rope: Array, scale: float
) -> Array:
    """Every query attends to every key up to its own, in latent space.

    Args:
        q_latent: [Lq, H, L].
        q_rope: [Lq, H, R].
        latent: [Lk, L]; the last query belongs to the last key.
        rope: [Lk, R].
        scale: Softmax scale.

    Returns:
        [Lq, H, L].
    """
    num_queries, num_heads, _ = q_latent.shape
    out = np.zeros(q_latent.shape)
    for query in range(num_queries):
        num_visible = latent.shape[0] - num_queries + query + 1
        for head in range(num_heads):
            logits = [
                scale
                * float(
                    np.dot(q_latent[query, head], latent[key])
                    + np.dot(q_rope[query, head], rope[key])
                )
                for key in range(num_visible)
            ]
            for key, probability in enumerate(softmax(logits)):
                out[query, head] += probability * latent[key]
    return out


def dense_causal_expanded(
    q_nope: Array, q_rope: Array, latent: Array, rope: Array, *, kv_b_proj: Array, scale: float
) -> Array:
    """The textbook form: keys and values of each head are computed from the latents first.

    Args:
        q_nope: [Lq, H, P].
        q_rope: [Lq, H, R].
        latent: [Lk, L].
        rope: [Lk, R], shared by the heads.
        kv_b_proj: [H*(P+V), L], per head the key channels first.
        scale: Softmax scale.

    Returns:
        [Lq, H, V].
    """
    num_queries, num_heads, key_dim = q_nope.shape
    per_head = kv_b_proj.shape[0] // num_heads
    out = np.zeros((num_queries, num_heads, per_head - key_dim))
    for head in range(num_heads):
        up = kv_b_proj[head * per_head : (head + 1) * per_head]
        keys = [np.concatenate((up[:key_dim] @ row, rope[i])) for i, row in enumerate(latent)]
        values = [up[key_dim:] @ row for row in latent]
        for query in range(num_queries):
            whole_query = np.concatenate((q_nope[query, head], q_rope[query, head]))
            num_visible = latent.shape[0] - num_queries + query + 1
            logits = [scale * float(np.dot(whole_query, key)) for key in keys[:num_visible]]
            for key, probability in enumerate(softmax(logits)):
                out[query, head] += probability * values[key]
    return out
