"""What a model's layers call: attention in two phases, so that a layer's KV leaves early.

    write_kv   computes the layer's new KV, writes it to the cache and records an event
    attend     chooses keys and attends over the cache

Between the two, the caller may hand the event on: rows of this layer can be sent while this layer
still attends. Strategies hold no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_core.backends.base import Event
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.weights import NativeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWritten:
    """A layer's KV of this step is in the cache once the event is complete.

    Attributes:
        layer: Layer index.
        event: Recorded after the last cache write of the layer (latent, rope and index_key) and
            before its attention.
    """

    layer: int
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Prolog:
    """What the first phase leaves for the second. Letters: shape.py.

    Attributes:
        written: Which layer, and when its cache rows are complete.
        hidden: [T, D], the layer's normed input.
        q_resid: [T, Q], normed query latent, the indexer's input.
        q_latent: [T, H, L], query carried into latent space.
        q_rope: [T, H, R], rotated, half-split.
    """

    written: KvWritten
    hidden: Tensor
    q_resid: Tensor
    q_latent: Tensor
    q_rope: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOutput:
    """Result of one layer's attention.

    Attributes:
        hidden: [T, D]; 0 in padding rows.
        topk: int32 [T, K], the keys each row attended to (see Kernels.lightning_indexer); what
            the next layers without an indexer need.
    """

    hidden: Tensor
    topk: Tensor


class AttentionStrategy(Protocol):
    """One way to run a layer's attention."""

    def write_kv(
        self,
        layer: int,
        hidden: Tensor,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> Prolog:
        """Write the layer's KV of this step and prepare the queries.

        Args:
            layer: Layer index, for messages and for whoever waits.
            hidden: [T, D], after the input norm.
            weights: The layer's weights.
            kv: The layer's cache; rows at plan.slot_mapping are written, no others.
            plan: The step.

        Raises:
            AttentionError: The layer has an indexer but its cache no index_key; names the layer.
        """

    def attend(
        self,
        prolog: Prolog,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
        shared_topk: Tensor | None,
    ) -> AttentionOutput:
        """Choose keys and attend.

        Args:
            prolog: What write_kv returned for the same layer and step.
            weights: The layer's weights.
            kv: The layer's cache.
            plan: The step.
            shared_topk: int32 [T, K], choice of the last layer that has an indexer; read only by
                layers without one.

        Raises:
            AttentionError: The layer has no indexer and shared_topk is None; names the layer.
        """
