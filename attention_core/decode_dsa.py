"""Sparse attention for decode: few queries per request, captured once and replayed.

Nothing here looks at lengths or content on the host: the same calls happen for every step of a
padded size.
"""

from __future__ import annotations

from torch import Tensor

from attention_core.backends.base import Device, Kernels
from attention_core.dsa_layer import DsaLayer, require_shared_topk
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.shape import AttentionShape
from attention_core.strategy import AttentionOutput, Prolog
from attention_core.weights import NativeWeights


class DsaDecode:
    """The decode strategy. Safe to capture."""

    def __init__(self, shape: AttentionShape, kernels: Kernels, device: Device) -> None:
        self._layer = DsaLayer(shape, kernels, device)

    def write_kv(
        self,
        layer: int,
        hidden: Tensor,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> Prolog:
        """See AttentionStrategy.write_kv."""
        return self._layer.write_kv(layer, hidden, weights, kv, plan)

    def attend(
        self,
        prolog: Prolog,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
        shared_topk: Tensor | None,
    ) -> AttentionOutput:
        """See AttentionStrategy.attend."""
        if weights.indexer is None:
            topk = require_shared_topk(prolog.written.layer, shared_topk)
        else:
            topk = self._layer.select(prolog, weights.indexer, kv, plan)
        return self._layer.attend(prolog, topk, weights, kv, plan)
