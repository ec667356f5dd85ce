"""Absorbed attention over chosen keys, row by row and head by head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.paging import Array, PagedRequest, logical_row


def softmax(logits: Sequence[float]) -> list[float]:
    """Softmax of at least one logit."""
    highest = max(logits)
    powers = [float(np.exp(logit - highest)) for logit in logits]
    return [power / sum(powers) for power in powers]


def keys_that_count(indices: Sequence[int], num_visible: int) -> list[int]:
    """The entries of a row of indices that the operator reads and keeps."""
    kept: list[int] = []
    for column, position in enumerate(indices):
        if position == -1 or column == num_visible:
            break
        if position < num_visible:
            kept.append(position)
    return kept


def sparse_attention(
    q_latent: Array,
    q_rope: Array,
    latent_cache: Array,
    rope_cache: Array,
    *,
    indices: Sequence[Sequence[int]],
    requests: Sequence[PagedRequest],
    scale: float,
) -> Array:
    """Attended latents of every row.

    Args:
        q_latent: [T, H, L].
        q_rope: [T, H, R].
        latent_cache: [nb, bs, L]; keys and values.
        rope_cache: [nb, bs, R].
        indices: T rows of positions.
        requests: Requests in row order; rows behind the last one's are padding.
        scale: Softmax scale.

    Returns:
        [T, H, L]; 0 in padding rows and where no key counts.
    """
    out = np.zeros(q_latent.shape)
    row = 0
    for request in requests:
        for query in range(request.query_len):
            kept = keys_that_count(indices[row], request.num_visible(query))
            latents = [logical_row(latent_cache, request, position) for position in kept]
            ropes = [logical_row(rope_cache, request, position) for position in kept]
            for head in range(q_latent.shape[1] if kept else 0):
                logits = [
                    scale * float(np.dot(q_latent[row, head], latent))
                    + scale * float(np.dot(q_rope[row, head], rope))
                    for latent, rope in zip(latents, ropes, strict=True)
                ]
                for probability, latent in zip(softmax(logits), latents, strict=True):
                    out[row, head] += probability * latent
            row += 1
    return out
