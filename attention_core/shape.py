"""Sizes of sparse multi-head latent attention, and the letters every docstring uses for them.

T   tokens of one step, requests concatenated, padding at the end
B   requests of one step, padding at the end
M   columns of the block table
D   hidden_size
H   num_heads
Q   q_lora_rank             latent query width
L   kv_lora_rank            latent key/value width
P   qk_nope_head_dim        width of a query or key head without position
R   qk_rope_head_dim        width of a query or key head with rotary position
V   v_head_dim
Hi  indexer.num_heads       Di  indexer.head_dim        K   indexer.topk
nb  blocks in the cache     bs  rows (tokens) in a block
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from attention_core.errors import AttentionConfigError


class RopeStyle(Enum):
    """How the indexer's rotary channels pair up.

    The main query and key always come in interleaved pairs from the checkpoint; only the indexer
    differs between model families.
    """

    HALF_SPLIT = "half_split"
    """Channel c turns with channel c + R/2 (DeepSeek-V3.2)."""
    INTERLEAVED = "interleaved"
    """Channel 2c turns with channel 2c + 1 (GLM)."""


def _require_positive(**sizes: int) -> None:
    for field, size in sizes.items():
        if size < 1:
            raise AttentionConfigError(field, size, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """Sizes of the lightning indexer.

    Attributes:
        num_heads: Hi.
        head_dim: Di; the rotary channels are the FIRST ones of a head.
        rope_head_dim: Rotary channels of a head; even.
        topk: K, keys that one query may attend to.
        rope_style: How the rotary channels pair up.
        norm_eps: Epsilon of the key LayerNorm.

    Raises:
        AttentionConfigError: A size is impossible.
    """

    num_heads: int
    head_dim: int
    rope_head_dim: int
    topk: int
    rope_style: RopeStyle
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _require_positive(
            **{
                "indexer.num_heads": self.num_heads,
                "indexer.head_dim": self.head_dim,
                "indexer.rope_head_dim": self.rope_head_dim,
                "indexer.topk": self.topk,
            }
        )
        if self.rope_head_dim % 2:
            raise AttentionConfigError("indexer.rope_head_dim", self.rope_head_dim, "even")
        if self.rope_head_dim > self.head_dim:
            raise AttentionConfigError(
                "indexer.rope_head_dim", self.rope_head_dim, f"at most head_dim {self.head_dim}"
            )
        if not self.norm_eps > 0:
            raise AttentionConfigError("indexer.norm_eps", self.norm_eps, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes and constants of one model's attention; the same in every layer.

    Attributes:
        hidden_size: D.
        num_heads: H.
        q_lora_rank: Q.
        kv_lora_rank: L.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R; even.
        v_head_dim: V.
        softmax_scale: Factor on the logits, yarn's share included; the model loader computes it.
        norm_eps: Epsilon of the two latent RMSNorms.
        indexer: Sizes of the indexer, of which some layers may have none.

    Raises:
        AttentionConfigError: A size is impossible.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    norm_eps: float
    indexer: IndexerShape

    def __post_init__(self) -> None:
        _require_positive(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.qk_rope_head_dim % 2:
            raise AttentionConfigError("qk_rope_head_dim", self.qk_rope_head_dim, "even")
        if not (self.softmax_scale > 0 and math.isfinite(self.softmax_scale)):
            raise AttentionConfigError("softmax_scale", self.softmax_scale, "finite and above 0")
        if not self.norm_eps > 0:
            raise AttentionConfigError("norm_eps", self.norm_eps, "above 0")
        if self.indexer.rope_head_dim != self.qk_rope_head_dim:
            # One table of cosines serves both; no released model has two widths.
            raise AttentionConfigError(
                "indexer.rope_head_dim",
                self.indexer.rope_head_dim,
                f"qk_rope_head_dim {self.qk_rope_head_dim}",
            )

    @property
    def qk_head_dim(self) -> int:
        """Width P + R of one query or key head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
