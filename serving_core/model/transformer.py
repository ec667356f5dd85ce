"""The causal language model: layers around an attention strategy, which is chosen by the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attention_core.paged_kv import KvComponent, PagedKvCache, layer_components
from attention_core.plan import AttentionPlan
from attention_core.rope import RopeTable
from attention_core.strategy import AttentionStrategy, KvWritten
from attention_core.weights import NativeWeights
from serving_core.model.config import ModelConfig
from serving_core.model.mlp import GatedMlp, RmsNorm
from serving_core.model.moe import MoeMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerLayer:
    """Weights of one pre-norm layer."""

    input_norm: RmsNorm
    attention: NativeWeights
    post_attention_norm: RmsNorm
    mlp: GatedMlp | MoeMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """A loaded model. It holds weights and no state: the cache and the plan come with each call.

    Attributes:
        config: the configuration, with the dtype that the weights have.
        embedding: [vocab, D].
        layers: the layers in order.
        final_norm: applied after the last layer.
        lm_head: [vocab, D].
        rope: cosines and sines of all positions up to max_position_embeddings.
        fingerprint: hex SHA-256 over the configuration and the stored bytes of all tensors; equal
            for equal models, however they are sharded.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[TransformerLayer, ...]
    final_norm: RmsNorm
    lm_head: Tensor
    rope: RopeTable
    fingerprint: str

    @property
    def kv_components(self) -> tuple[tuple[KvComponent, ...], ...]:
        """The cache components of each layer; a layer without an indexer has no index key."""
        return tuple(
            layer_components(
                self.config.attention, dtype=self.config.dtype, has_indexer=has_indexer
            )
            for has_indexer in self.config.has_indexer
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        plan: AttentionPlan,
        cache: PagedKvCache,
        strategy: AttentionStrategy,
        *,
        on_kv_written: Callable[[KvWritten], None] | None = None,
        on_topk: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Computes one step: writes its rows of KV to `cache` and returns the hidden states.

        Args:
            token_ids: int64 [T], padding included (any valid id); rows as in `plan`.
            plan: the step.
            cache: `kv_components` of all layers.
            strategy: how attention is computed.
            on_kv_written: called once a layer, after its cache writes were issued and before its
                attention.
            on_topk: called once a layer with the layer and the int32 [T, K] key positions that its
                rows attended to, -1 where there is none; the tensor is only lent.

        Returns:
            [T, D] in the model's dtype, after the final norm; rows of padding mean nothing.
        """
        hidden = functional.embedding(token_ids, self.embedding)  # [T, D]
        # Only the choice of the last layer that has an indexer is passed on.
        topk: Tensor | None = None
        for index, layer in enumerate(self.layers):
            kv = cache.layers[index]
            prolog = strategy.write_kv(index, layer.input_norm(hidden), layer.attention, kv, plan)
            if on_kv_written is not None:
                on_kv_written(prolog.written)
            attended = strategy.attend(prolog, layer.attention, kv, plan, topk)
            topk = attended.topk
            if on_topk is not None:
                on_topk(index, topk)
            hidden = hidden + attended.hidden
            hidden = hidden + layer.mlp(layer.post_attention_norm(hidden))
        return self.final_norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, vocab] of hidden [N, D], which `forward` returned."""
        return functional.linear(hidden, self.lm_head).float()
