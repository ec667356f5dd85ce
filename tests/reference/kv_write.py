"""Norms, and the write of a step's latent and rope rows, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.paging import Array
from tests.reference.rope import rope_interleaved_to_half


def rms_norm(row: Array, weight: Array, eps: float) -> Array:
    """``weight * row / sqrt(mean(row^2) + eps)``."""
    normed: Array = row / np.sqrt(np.mean(row**2) + eps)
    return weight * normed


def layer_norm(row: Array, weight: Array, bias: Array, eps: float) -> Array:
    """``weight * (row - mean) / sqrt(variance + eps) + bias``."""
    centred = row - np.mean(row)
    normed: Array = centred / np.sqrt(np.mean(centred**2) + eps)
    return weight * normed + bias


def scatter_rows(cache: Array, slots: Sequence[int], rows: Array) -> Array:
    """A copy of cache [nb, bs, W] with row t of rows at slot t; slots below 0 are dropped."""
    out = cache.copy()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            out[slot // cache.shape[1], slot % cache.shape[1]] = row
    return out


def kv_rmsnorm_rope_cache(
    kv: Array,
    gamma: Array,
    *,
    cos: Array,
    sin: Array,
    slots: Sequence[int],
    rope_cache: Array,
    latent_cache: Array,
    eps: float,
) -> tuple[Array, Array]:
    """Copies of both caches after the write.

    Args:
        kv: [T, L+R], latent first, rotary pairs interleaved.
        gamma: [L].
        cos: [T, R].
        sin: [T, R].
        slots: T cache rows.
        rope_cache: [nb, bs, R].
        latent_cache: [nb, bs, L].
        eps: RMSNorm epsilon.

    Returns:
        The rope cache, then the latent cache.
    """
    latent_dim = gamma.shape[0]
    latent = np.array([rms_norm(row[:latent_dim], gamma, eps) for row in kv])
    rope = np.array(
        [
            rope_interleaved_to_half(row[latent_dim:], cos[token], sin[token])
            for token, row in enumerate(kv)
        ]
    )
    return scatter_rows(rope_cache, slots, rope), scatter_rows(latent_cache, slots, latent)
