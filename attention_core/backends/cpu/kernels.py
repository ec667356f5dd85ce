"""The CPU's operators behind the Kernels protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_core.backends.cpu import lightning_indexer, pointwise, sparse_attention
from attention_core.errors import AttentionConfigError
from attention_core.plan import AttentionPlan

DEFAULT_TILE_ELEMENTS = 1 << 20
"""4 MiB of fp32: a tile stays in cache, and its matrix products are still large."""


class CpuKernels:
    """Vectorised torch operators; stateless, usable from any thread.

    Semantics: attention_core/backends/base.py.
    """

    def __init__(self, *, tile_elements: int = DEFAULT_TILE_ELEMENTS) -> None:
        """Choose how much scratch memory an operator may use.

        Args:
            tile_elements: fp32 elements of one tile's buffers. The modules lightning_indexer and
                sparse_attention give the formulas; results do not depend on it beyond rounding.

        Raises:
            AttentionConfigError: tile_elements is below 1.
        """
        if tile_elements < 1:
            raise AttentionConfigError("tile_elements", tile_elements, "at least 1")
        self._tile_elements = tile_elements

    def lightning_indexer(
        self, q: Tensor, weights: Tensor, key_cache: Tensor, plan: AttentionPlan, topk: int
    ) -> Tensor:
        """Choose the keys each query attends to."""
        if topk < 1:
            raise AttentionConfigError("topk", topk, "at least 1")
        return lightning_indexer.lightning_indexer(
            q, weights, key_cache, plan, topk=topk, budget=self._tile_elements
        )

    def sparse_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        indices: Tensor,
        *,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """Absorbed latent attention over chosen keys."""
        return sparse_attention.sparse_attention(
            q_latent,
            q_rope,
            latent_cache,
            rope_cache,
            indices,
            plan=plan,
            scale=scale,
            budget=self._tile_elements,
        )

    def kv_rmsnorm_rope_cache(
        self,
        kv: Tensor,
        gamma: Tensor,
        *,
        eps: float,
        plan: AttentionPlan,
        rope_cache: Tensor,
        latent_cache: Tensor,
    ) -> None:
        """Norm the latent, rotate the rest, write both to the cache."""
        num_latent = latent_cache.shape[-1]
        latent, rope = kv[:, :num_latent], kv[:, num_latent:]
        rotated = pointwise.rope_interleaved_to_half(rope, plan.cos, plan.sin)
        normed = pointwise.rms_norm(latent, gamma, eps)
        pointwise.scatter_rows(rope_cache, plan.slot_mapping, rotated)
        pointwise.scatter_rows(latent_cache, plan.slot_mapping, normed)

    def rope_interleaved_to_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (2c, 2c+1) and leave the result half-split."""
        return pointwise.rope_interleaved_to_half(x, cos, sin)

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (c, c + R/2) in place of each other."""
        return pointwise.rope_half(x, cos, sin)

    def rope_interleaved(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (2c, 2c+1) in place of each other."""
        return pointwise.rope_interleaved(x, cos, sin)

    def scatter_rows(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write the rows whose slot is at or above 0."""
        pointwise.scatter_rows(cache, slots, rows)

    def batch_matmul_transpose(self, a: Tensor, b: Tensor) -> Tensor:
        """``out[t, n] = a[t, n] @ b[n]``."""
        return torch.bmm(a.transpose(0, 1), b).transpose(0, 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dim."""
        return pointwise.rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last dim."""
        return pointwise.layer_norm(x, weight, bias, eps)
