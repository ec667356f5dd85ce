"""Sparse latent attention of a layer, from absorbed queries to the hidden state.

Letters: shape.py.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from attention_core.backends.base import Kernels
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.shape import AttentionShape
from attention_core.weights import NativeWeights


class SparseAttention:
    """Attends over chosen keys, then leaves latent space through W_UV and the output projection."""

    def __init__(self, shape: AttentionShape, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels

    def attend(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        topk: Tensor,
        weights: NativeWeights,
        *,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> Tensor:
        """Attend.

        Args:
            q_latent: [T, H, L].
            q_rope: [T, H, R], half-split.
            topk: int32 [T, K], keys of each row.
            weights: The layer's weights.
            kv: The layer's cache.
            plan: The step.

        Returns:
            [T, D]; 0 in padding rows.
        """
        attended = self._kernels.sparse_attention(
            q_latent,
            q_rope,
            kv.latent,
            kv.rope,
            topk,
            plan=plan,
            scale=self._shape.softmax_scale,
        )
        values = self._kernels.batch_matmul_transpose(attended, weights.w_uv)  # [T, H, V]
        return functional.linear(values.flatten(1), weights.o_proj)
