"""Sparse attention for prefill: long query runs, eager, context-parallel by design.

One rank holds all tokens today. With more, each computes its own rows of a step and the ranks
exchange them between projection and cache write in write_kv; the queries stay local, with the key
lengths of the rank's plan.
"""

from __future__ import annotations

from torch import Tensor

from attention_core.backends.base import Device, Kernels
from attention_core.dsa_layer import DsaLayer, require_shared_topk
from attention_core.indexer import every_visible_key
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.shape import AttentionShape
from attention_core.strategy import AttentionOutput, Prolog
from attention_core.weights import NativeWeights


class DsaCpPrefill:
    """The prefill strategy. Runs eagerly, so it may decide on host lengths."""

    def __init__(self, shape: AttentionShape, kernels: Kernels, device: Device) -> None:
        self._layer = DsaLayer(shape, kernels, device)
        self._topk = shape.indexer.topk

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
        """See AttentionStrategy.attend.

        A step whose requests all fit in the top-k is not scored: every visible key is chosen
        whatever its score, and listed by position.
        """
        if weights.indexer is None:
            topk = require_shared_topk(prolog.written.layer, shared_topk)
        elif max(plan.host.key_lens, default=0) <= self._topk:
            topk = every_visible_key(plan, self._topk)
        else:
            topk = self._layer.select(prolog, weights.indexer, kv, plan)
        return self._layer.attend(prolog, topk, weights, kv, plan)
