"""Captured decode steps: one per padded batch size, over buffers that never move.

A batch runs in the smallest captured step that holds it; its unused rows are padding (slot -1,
key length 0), and whatever padding rows compute, no real row changes. A batch beyond the largest
captured size runs the same step uncaptured. Compute thread only, once built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.backends.base import Device, Graph
from attention_core.paged_kv import PagedKvCache
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.strategy import AttentionStrategy
from decode_service.scheduler import DecodeSequence
from serving_core.model.transformer import CausalLM

StepObserver = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEntry:
    """One step over its own buffers. B: padded batch size, V: vocabulary, K: chosen keys.

    Attributes:
        token_ids: int64 [B], the newest token of each sequence.
        plan: Sized for B sequences of the longest length.
        logits: fp32 [B, V], what the step leaves.
        topk: int32 [B, K] per layer that chooses keys; empty unless somebody observes.
        graph: The captured work.
    """

    token_ids: Tensor
    plan: AttentionPlan
    logits: Tensor
    topk: dict[int, Tensor]
    graph: Graph


def graph_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the powers of two below `max_batch_size`, and `max_batch_size` itself; none for 0.

    Three of four rows are thus in use at worst half the time, for log2 many captures.
    """
    if max_batch_size == 0:
        return ()
    sizes = []
    size = 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2
    return (*sizes, max_batch_size)


class GraphRunner:
    """Runs decode steps of any batch size."""

    def __init__(
        self,
        *,
        model: CausalLM,
        cache: PagedKvCache,
        strategy: AttentionStrategy,
        device: Device,
        max_graph_batch_size: int,
        max_model_len: int,
        observer: StepObserver | None = None,
    ) -> None:
        """Take the collaborators; `capture` makes the graphs.

        Args:
            model: The model.
            cache: The paged KV cache; its address must not change any more.
            strategy: How attention is computed.
            device: Where graphs are captured.
            max_graph_batch_size: Largest captured batch.
            max_model_len: Longest sequence, in tokens.
            observer: Is given (layer, chosen keys int32 [T, K], positions int64 [T]) of the real
                rows after each step, for tests that compare chosen keys.
        """
        self._model = model
        self._cache = cache
        self._strategy = strategy
        self._device = device
        self._sizes = graph_batch_sizes(max_graph_batch_size)
        self._max_blocks = -(-max_model_len // cache.block_size)
        self._observer = observer
        self._entries: dict[int, GraphEntry] = {}

    def capture(self) -> None:
        """Capture the step for every padded batch size; raises what the step raises."""
        for size in reversed(self._sizes):
            self._entries[size] = self._capture(size)

    def step(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        """Compute the KV of each sequence's newest token and what may follow it.

        Returns:
            fp32 [N, V] logits; valid until the next step.
        """
        size = next((size for size in self._sizes if size >= len(sequences)), None)
        if size is None:
            return self._step_eagerly(sequences)
        entry = self._entries[size]
        entry.plan.load(self._plan(sequences, size=size))
        entry.token_ids[: len(sequences)] = self._token_ids(sequences)
        entry.graph.replay()
        self._observe(entry.topk, entry.plan, len(sequences))
        return entry.logits[: len(sequences)]

    def _capture(self, size: int) -> GraphEntry:
        device = self._model.rope.cos.device
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        plan = self._plan((), size=size)
        logits = torch.zeros(
            (size, self._model.config.vocab_size), dtype=torch.float32, device=device
        )
        topk: dict[int, Tensor] = {}

        def run() -> None:
            hidden = self._forward(token_ids, plan, topk)
            logits.copy_(self._model.logits(hidden))

        graph = self._device.capture(run)
        return GraphEntry(token_ids=token_ids, plan=plan, logits=logits, topk=topk, graph=graph)

    def _step_eagerly(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        plan = self._plan(sequences, size=len(sequences))
        topk: dict[int, Tensor] = {}
        token_ids = self._token_ids(sequences).to(plan.positions.device)
        hidden = self._forward(token_ids, plan, topk)
        self._observe(topk, plan, len(sequences))
        return self._model.logits(hidden)

    def _forward(self, token_ids: Tensor, plan: AttentionPlan, topk: dict[int, Tensor]) -> Tensor:
        """Run the model; chosen keys are left in `topk`, in place where it has the layer."""

        def keep(layer: int, chosen: Tensor) -> None:
            if layer in topk:
                topk[layer].copy_(chosen)
            else:
                topk[layer] = chosen.clone()

        return self._model.forward(
            token_ids,
            plan,
            self._cache,
            self._strategy,
            on_topk=keep if self._observer is not None else None,
        )

    def _observe(self, topk: dict[int, Tensor], plan: AttentionPlan, num_real: int) -> None:
        if self._observer is not None:
            for layer, chosen in topk.items():
                self._observer(layer, chosen[:num_real].clone(), plan.positions[:num_real].clone())

    def _plan(self, sequences: Sequence[DecodeSequence], *, size: int) -> AttentionPlan:
        return build_plan(
            [
                QuerySpan(
                    num_queries=1,
                    num_computed=sequence.num_tokens - 1,
                    block_ids=sequence.block_ids,
                )
                for sequence in sequences
            ],
            block_size=self._cache.block_size,
            rope=self._model.rope,
            num_padded_tokens=size,
            num_padded_requests=size,
            max_blocks=self._max_blocks,
        )

    def _token_ids(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        return torch.tensor([sequence.last_token_id for sequence in sequences], dtype=torch.int64)
