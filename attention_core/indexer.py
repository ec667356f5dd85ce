"""The lightning indexer of a layer: writes index keys, chooses keys for queries.

Letters: shape.py. Source: DeepSeek-V3.2 technical report, section 2.1, without the Hadamard
rotation and fp8, which leave the dot products as they are up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attention_core.backends.base import Kernels
from attention_core.plan import AttentionPlan
from attention_core.shape import IndexerShape, RopeStyle
from attention_core.weights import IndexerWeights


class Indexer:
    """Index keys and choices in floating point."""

    def __init__(self, shape: IndexerShape, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels
        styles = {
            RopeStyle.HALF_SPLIT: kernels.rope_half,
            RopeStyle.INTERLEAVED: kernels.rope_interleaved,
        }
        self._rope = styles[shape.rope_style]
        # Both factors are positive and change no choice; they keep scores comparable with the
        # published formula.
        self._score_scale = shape.head_dim**-0.5 * shape.num_heads**-0.5

    def write_keys(
        self, hidden: Tensor, weights: IndexerWeights, key_cache: Tensor, plan: AttentionPlan
    ) -> None:
        """Write the index keys of the step.

        Args:
            hidden: [T, D].
            weights: The layer's indexer weights.
            key_cache: [nb, bs, Di]; written at plan.slot_mapping.
            plan: The step.
        """
        keys = functional.linear(hidden, weights.wk)
        keys = self._kernels.layer_norm(
            keys, weights.k_norm_weight, weights.k_norm_bias, self._shape.norm_eps
        )
        self._kernels.scatter_rows(key_cache, plan.slot_mapping, self._rotate(keys, plan))

    def select(
        self,
        hidden: Tensor,
        q_resid: Tensor,
        weights: IndexerWeights,
        key_cache: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """Choose the keys each row attends to.

        Args:
            hidden: [T, D].
            q_resid: [T, Q], normed query latent.
            weights: The layer's indexer weights.
            key_cache: [nb, bs, Di].
            plan: The step.

        Returns:
            int32 [T, K], see Kernels.lightning_indexer.
        """
        shape = self._shape
        q = functional.linear(q_resid, weights.wq_b).view(-1, shape.num_heads, shape.head_dim)
        head_weights = functional.linear(hidden, weights.weights_proj).float() * self._score_scale
        return self._kernels.lightning_indexer(
            self._rotate(q, plan), head_weights, key_cache, plan, shape.topk
        )

    def _rotate(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """Rotate the first channels of x [T, (Hi,) Di]; the others have no position."""
        rope_dim = self._shape.rope_head_dim
        rotated = self._rope(x[..., :rope_dim], plan.cos, plan.sin)
        return torch.cat((rotated, x[..., rope_dim:]), dim=-1)


def every_visible_key(plan: AttentionPlan, topk: int) -> Tensor:
    """The choice of rows that see no more than topk keys: all of them, by position.

    Returns:
        int32 [T, K]: 0 .. n-1 where n keys are visible, then -1.
    """
    num_queries = plan.cum_query_lens[-1:]
    is_padding = torch.arange(plan.num_tokens, device=num_queries.device) >= num_queries
    num_visible = (plan.positions + 1).masked_fill(is_padding, 0)
    columns = torch.arange(topk, dtype=torch.int32, device=num_visible.device)
    every = columns.expand(plan.num_tokens, -1)
    return every.masked_fill(columns >= num_visible[:, None], -1)
