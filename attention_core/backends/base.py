"""What a backend gives: operators, events and captured steps. Letters: shape.py.

Rules that hold for every operator and are tested by one suite over all backends:

- Rows from ``plan.cum_query_lens[-1]`` on are padding. Whatever they hold, NaN included, no other
  row changes; their own results are defined: 0, or -1 for indices.
- A slot below 0 writes nothing; that cache row stays untouched.
- Cache rows at or past a request's key length, and block table entries past its last block, are
  never used, whatever they hold.
- A request with no queries or no keys is legal anywhere in the batch.
- Sums run in fp32, whatever the dtype of the cache.
- Lengths are read from the plan's tensors, so that a captured step can be replayed with others.

Source of the operators' meaning: the Ascend operator set for sparse attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from attention_core.plan import AttentionPlan


class Event(Protocol):
    """A point in a device's work. Made once, recorded once; thread-safe."""

    def record(self) -> None:
        """Mark the point: the event completes when all work submitted before this call has.

        Called by the thread that submits the work.
        """

    def query(self) -> bool:
        """Whether the event was recorded and its work has completed. Never blocks."""

    def synchronize(self, timeout_s: float) -> bool:
        """Wait until the event is complete; releases the GIL while it waits.

        Args:
            timeout_s: Longest wait in seconds; 0 or less only asks.

        Returns:
            Whether it completed in time. An event that nobody records never completes.
        """


class Graph(Protocol):
    """One captured step over buffers at fixed addresses."""

    def replay(self) -> None:
        """Run the captured work on what the buffers hold now."""


class Device(Protocol):
    """A place where operators run."""

    @property
    def name(self) -> str:
        """The name torch knows it by, such as "cpu"."""

    def new_event(self) -> Event:
        """A fresh, unrecorded event."""

    def capture(self, fn: Callable[[], None]) -> Graph:
        """Freeze a step.

        fn reads and writes only buffers that outlive the graph, makes no decision on their
        content in Python, and returns nothing. It is run once here, so its errors show at
        capture: the caller fills the buffers with padding first (every slot -1).
        """


class Kernels(Protocol):
    """The operators of sparse latent attention."""

    def lightning_indexer(
        self, q: Tensor, weights: Tensor, key_cache: Tensor, plan: AttentionPlan, topk: int
    ) -> Tensor:
        """Choose the keys each query attends to.

        ``score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])`` over the keys s visible to t
        (right-down causal, see AttentionPlan), of which the topk highest are taken. Weights, and
        so scores, may be negative.

        Args:
            q: [T, Hi, Di], rotated.
            weights: fp32 [T, Hi], constants folded in.
            key_cache: [nb, bs, Di].
            plan: The step.
            topk: K, at least 1.

        Returns:
            int32 [T, K], contiguous: logical positions inside the row's request, valid ones first
            by score descending and, among equal scores, position ascending; then -1. The same
            order decides which of several equal scores is taken at the cut. With fewer than K
            visible keys all of them come back; with none the row is all -1, as are padding rows.
        """

    def sparse_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        indices: Tensor,
        *,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """Absorbed latent attention over chosen keys.

        ``z[h, j] = scale * (q_latent[t, h] . latent[j] + q_rope[t, h] . rope[j])`` and
        ``out[t, h] = sum_j softmax(z[h])[j] * latent[j]``.

        Args:
            q_latent: [T, H, L].
            q_rope: [T, H, R], half-split like the cache.
            latent_cache: [nb, bs, L].
            rope_cache: [nb, bs, R].
            indices: int32 [T, K'], logical positions. The first -1 ends a row: what stands after
                it is ignored. So is any entry from column n on where n keys are visible. Positions
                in the future of the query are dropped. Order does not matter; a position given
                twice counts twice.
            plan: The step.
            scale: Softmax scale.

        Returns:
            [T, H, L] of q_latent's dtype; 0 in padding rows and in rows that see nothing.
        """

    def kv_rmsnorm_rope_cache(
        self,
        kv: Tensor,
        gamma: Tensor,
        *,
        eps: float,
        plan: AttentionPlan,
        rope_cache: Tensor,
        latent_cache: Tensor,
    ) -> None:
        """Norm the latent, rotate the rest, write both to the cache.

        Args:
            kv: [T, L+R], latent first, rotary channels in interleaved pairs.
            gamma: [L], RMSNorm weight.
            eps: RMSNorm epsilon.
            plan: The step; slot_mapping says where, -1 drops. Valid slots are unique.
            rope_cache: [nb, bs, R], written half-split.
            latent_cache: [nb, bs, L], written.
        """

    def rope_interleaved_to_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (2c, 2c+1) and leave the result half-split (even channels, then odd).

        Args:
            x: [T, R] or [T, N, R].
            cos: fp32 [T, R], frequencies tiled twice.
            sin: fp32 [T, R].

        Returns:
            Like x. Equals rope_half of the channels reordered even first.
        """

    def rope_half(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (c, c + R/2) in place of each other; arguments as above."""

    def rope_interleaved(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (2c, 2c+1) in place of each other; arguments as above."""

    def scatter_rows(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write ``cache[slot // bs, slot % bs] = row`` for every slot at or above 0.

        Args:
            cache: [nb, bs, W], written.
            slots: int64 [T]; below 0 drops the row. Valid slots are unique.
            rows: [T, W], cast to the cache's dtype.
        """

    def batch_matmul_transpose(self, a: Tensor, b: Tensor) -> Tensor:
        """``out[t, n] = a[t, n] @ b[n]`` for a [T, N, X] and b [N, X, Y]; out [T, N, Y]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dim, normed in fp32, like x."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last dim, normed in fp32, like x."""
