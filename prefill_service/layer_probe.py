"""Knows which layer a model step is at, so that a failed step names its layer.

The model calls the attention strategy once per layer, before anything else of that layer is
computed, so whatever is raised between two calls belongs to the layer of the first.
"""

import torch

from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.strategy import AttentionOutput, AttentionStrategy, Prolog
from attention_core.weights import NativeWeights


class LayerProbe:
    """An attention strategy that passes everything on and remembers the layer."""

    def __init__(self, inner: AttentionStrategy) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self._layer: int | None = None

    @property
    def layer(self) -> int | None:
        """The layer that is computed; None outside the layers."""
        return self._layer

    def leave_layers(self) -> None:
        """Say that what follows, or what precedes the first layer, belongs to no layer."""
        self._layer = None

    def write_kv(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> Prolog:
        """See AttentionStrategy.write_kv."""
        self._layer = layer
        return self._inner.write_kv(layer, hidden, weights, kv, plan)

    def attend(
        self,
        prolog: Prolog,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
        shared_topk: torch.Tensor | None,
    ) -> AttentionOutput:
        """See AttentionStrategy.attend."""
        return self._inner.attend(prolog, weights, kv, plan, shared_topk)
