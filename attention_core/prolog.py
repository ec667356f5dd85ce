"""The native prolog: down-projections, norms, query up-projection, absorption, rope, KV write.

Letters: shape.py. Both strategies use it; a fused one for quantised weights comes beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from attention_core.backends.base import Kernels
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.shape import AttentionShape
from attention_core.weights import NativeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedQuery:
    """Queries in the form the sparse attention takes.

    Attributes:
        q_resid: [T, Q], normed query latent.
        q_latent: [T, H, L].
        q_rope: [T, H, R], half-split.
    """

    q_resid: Tensor
    q_latent: Tensor
    q_rope: Tensor


class NativeProlog:
    """Projections in the weights' own floating-point type."""

    def __init__(self, shape: AttentionShape, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels

    def write_latent(
        self, hidden: Tensor, weights: NativeWeights, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        """Write the latent and rope rows of the step.

        Args:
            hidden: [T, D].
            weights: The layer's weights.
            kv: The layer's cache; written at plan.slot_mapping.
            plan: The step.
        """
        self._kernels.kv_rmsnorm_rope_cache(
            functional.linear(hidden, weights.kv_a_proj),  # [T, L+R]
            weights.kv_a_norm,
            eps=self._shape.norm_eps,
            plan=plan,
            rope_cache=kv.rope,
            latent_cache=kv.latent,
        )

    def query(self, hidden: Tensor, weights: NativeWeights, plan: AttentionPlan) -> AbsorbedQuery:
        """Project, absorb W_UK and rotate the queries of hidden [T, D]."""
        shape, kernels = self._shape, self._kernels
        q_a = functional.linear(hidden, weights.q_a_proj)
        q_resid = kernels.rms_norm(q_a, weights.q_a_norm, shape.norm_eps)
        q = functional.linear(q_resid, weights.q_b_proj)
        q = q.view(-1, shape.num_heads, shape.qk_head_dim)  # [T, H, P+R]
        q_nope = q[..., : shape.qk_nope_head_dim]
        q_rope = q[..., shape.qk_nope_head_dim :]
        return AbsorbedQuery(
            q_resid=q_resid,
            q_latent=kernels.batch_matmul_transpose(q_nope, weights.w_uk_t),
            q_rope=kernels.rope_interleaved_to_half(q_rope, plan.cos, plan.sin),
        )
