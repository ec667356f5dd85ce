"""The maths of one sparse-attention layer, which both strategies compose."""

from __future__ import annotations

from torch import Tensor

from attention_core.backends.base import Device, Kernels
from attention_core.errors import AttentionError
from attention_core.indexer import Indexer
from attention_core.paged_kv import LayerKv
from attention_core.plan import AttentionPlan
from attention_core.prolog import NativeProlog
from attention_core.shape import AttentionShape
from attention_core.sparse_attention import SparseAttention
from attention_core.strategy import AttentionOutput, KvWritten, Prolog
from attention_core.weights import IndexerWeights, NativeWeights


class DsaLayer:
    """Writes a layer's KV, chooses keys, attends. Holds no state between calls."""

    def __init__(self, shape: AttentionShape, kernels: Kernels, device: Device) -> None:
        self._prolog = NativeProlog(shape, kernels)
        self._indexer = Indexer(shape.indexer, kernels)
        self._attention = SparseAttention(shape, kernels)
        self._device = device

    def write_kv(
        self,
        layer: int,
        hidden: Tensor,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> Prolog:
        """See AttentionStrategy.write_kv.

        The queries come after the event: whoever waits for the KV need not wait for them.
        """
        event = self._device.new_event()
        self._prolog.write_latent(hidden, weights, kv, plan)
        if weights.indexer is not None:
            key_cache = _index_key_cache(layer, kv)
            self._indexer.write_keys(hidden, weights.indexer, key_cache, plan)
        event.record()
        query = self._prolog.query(hidden, weights, plan)
        return Prolog(
            written=KvWritten(layer=layer, event=event),
            hidden=hidden,
            q_resid=query.q_resid,
            q_latent=query.q_latent,
            q_rope=query.q_rope,
        )

    def select(
        self, prolog: Prolog, weights: IndexerWeights, kv: LayerKv, plan: AttentionPlan
    ) -> Tensor:
        """Choose keys with the layer's own indexer; int32 [T, K]."""
        key_cache = _index_key_cache(prolog.written.layer, kv)
        return self._indexer.select(prolog.hidden, prolog.q_resid, weights, key_cache, plan)

    def attend(
        self,
        prolog: Prolog,
        topk: Tensor,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
    ) -> AttentionOutput:
        """Attend over the chosen keys."""
        hidden = self._attention.attend(
            prolog.q_latent, prolog.q_rope, topk, weights, kv=kv, plan=plan
        )
        return AttentionOutput(hidden=hidden, topk=topk)


def require_shared_topk(layer: int, shared_topk: Tensor | None) -> Tensor:
    """The earlier layer's choice, which a layer without an indexer lives on.

    Raises:
        AttentionError: There is none.
    """
    if shared_topk is None:
        raise AttentionError(f"layer {layer} has no indexer and no earlier layer's top-k was given")
    return shared_topk


def _index_key_cache(layer: int, kv: LayerKv) -> Tensor:
    if kv.index_key is None:
        raise AttentionError(f"layer {layer} has an indexer but its cache has no index_key")
    return kv.index_key
