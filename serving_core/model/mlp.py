"""Row-wise parts of a layer, RMSNorm and the gated MLP: a row depends on nothing but itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Root-mean-square norm.

    Attributes:
        weight: [D], in the model's dtype.
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Norms hidden [T, D] in fp32, rounds to its dtype, then multiplies by the weight."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """SwiGLU MLP: down(silu(gate(x)) * up(x)).

    Attributes:
        gate_up: [2*I, D], the gate's rows first; fused so that the input is read once.
        down: [D, I].
    """

    gate_up: Tensor
    down: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Applies the MLP to hidden [T, D]."""
        return gated_mlp(hidden, self.gate_up, self.down)


def gated_mlp(hidden: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of hidden [n, D] with gate_up [2*I, D] and down [D, I]."""
    gate, up = functional.linear(hidden, gate_up).chunk(2, dim=-1)  # [n, I] each
    return functional.linear(functional.silu(gate) * up, down)
