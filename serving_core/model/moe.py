"""Mixture of experts: the grouped sigmoid router and the routed experts of one rank.

Letters: E experts, K experts a token goes to, I width of an expert; the others as in
`attention_core/shape.py`. Everything is row-wise: a padding row may hold NaN, and no other row sees
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from serving_core.model.config import MoeShape
from serving_core.model.mlp import GatedMlp, gated_mlp

# As the released models divide by the sum of the chosen scores.
_SUM_EPS = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where each token goes.

    Attributes:
        expert_ids: int64 [T, K], distinct in a row, in no particular order.
        weights: fp32 [T, K].
    """

    expert_ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Picks experts by biased sigmoid scores within the best groups, and weighs by unbiased scores.

    Attributes:
        weight: fp32 [E, D].
        correction_bias: fp32 [E]; moves the choice and never the weights.
        shape: the layer's sizes.

    Source: DeepSeek-V3 technical report, section 2.1.2 (arXiv:2412.19437).
    """

    weight: Tensor
    correction_bias: Tensor
    shape: MoeShape

    def __call__(self, hidden: Tensor) -> Routing:
        """Routes hidden [T, D]; all arithmetic is fp32."""
        scores = functional.linear(hidden.float(), self.weight).sigmoid()  # [T, E]
        choice = self._outside_groups_removed(scores + self.correction_bias)
        expert_ids = choice.topk(self.shape.experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, expert_ids)  # [T, K]
        if self.shape.normalize_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _SUM_EPS)
        return Routing(expert_ids=expert_ids, weights=weights * self.shape.scaling_factor)

    def _outside_groups_removed(self, choice: Tensor) -> Tensor:
        """choice [T, E] with -inf outside the groups whose two best experts sum highest."""
        if self.shape.groups_per_token == self.shape.num_groups:
            return choice
        groups = (self.shape.num_groups, self.shape.num_experts // self.shape.num_groups)
        grouped = choice.view(-1, *groups)  # [T, groups, E / groups]
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = group_scores.topk(self.shape.groups_per_token, dim=-1, sorted=False).indices
        removed = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(removed.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The routed experts that one rank holds: `first_expert` and the ones after it.

    Attributes:
        gate_up: [n, 2*I, D], contiguous, the gate's rows first.
        down: [n, D, I], contiguous.
        first_expert: id of the first expert held.
    """

    gate_up: Tensor
    down: Tensor
    first_expert: int = 0

    def __call__(self, hidden: Tensor, routing: Routing) -> Tensor:
        """The held experts' weighted sum for hidden [T, D], accumulated in fp32: fp32 [T, D].

        Tokens that go to experts of other ranks get 0 for them: the sum over all ranks' results is
        the layer's. An expert's tokens are gathered and computed together, in the order of expert
        ids, so that a row's sum does not depend on the other rows.
        """
        num_held, num_choices = self.gate_up.shape[0], routing.expert_ids.shape[1]
        held = routing.expert_ids.flatten() - self.first_expert  # [T * K]
        held = torch.where((held >= 0) & (held < num_held), held, num_held)
        by_expert = held.argsort(stable=True)
        tokens = by_expert // num_choices
        weights = routing.weights.flatten()[by_expert].unsqueeze(-1)
        counts = torch.bincount(held, minlength=num_held + 1)[:num_held].tolist()
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            own = slice(start, start + count)
            rows = gated_mlp(hidden[tokens[own]], self.gate_up[expert], self.down[expert])
            output.index_add_(0, tokens[own], rows * weights[own])
            start += count
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """A sparse layer's MLP: routed experts plus the shared one, which is not scaled."""

    router: Router
    experts: RoutedExperts
    shared: GatedMlp

    def __call__(self, hidden: Tensor) -> Tensor:
        """Applies the layer to hidden [T, D]."""
        routed = self.experts(hidden, self.router(hidden))
        return routed.to(hidden.dtype) + self.shared(hidden)
