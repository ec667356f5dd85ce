"""Greedy decoding with transformers (fp32, eager, cached): the truth that engines are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

# A member of a top-k set may differ only when its score is this close to the boundary, as a
# fraction of the standard deviation of the row's visible scores: rounding alone moves it so far.
BOUNDARY_GAP_IN_STDS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleSelection:
    """What one layer's indexer chose for one query.

    Attributes:
        chosen: the chosen positions, all at or before the query's own.
        scores: fp32 [position + 1]: index scores of the visible keys.
    """

    chosen: frozenset[int]
    scores: torch.Tensor

    def accepts(self, chosen: frozenset[int]) -> bool:
        """Whether `chosen` is this set, but for members on the boundary up to rounding."""
        if chosen == self.chosen:
            return True
        if len(chosen) != len(self.chosen):
            return False
        boundary = min(float(self.scores[position]) for position in self.chosen)
        gap = BOUNDARY_GAP_IN_STDS * float(self.scores.std())
        differing = chosen ^ self.chosen
        return all(abs(float(self.scores[position]) - boundary) < gap for position in differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleRun:
    """One prompt's greedy continuation.

    Attributes:
        token_ids: the new tokens.
        logits: fp32 [num_new_tokens, vocab]: the logits that each new token was taken from.
        selections: `selections[layer][position]`, for every position whose KV was computed. A layer
            with a shared indexer repeats the selection of the last layer that has its own.
    """

    token_ids: list[int]
    logits: torch.Tensor
    selections: list[list[OracleSelection]]


class _CaptureTopk(TorchFunctionMode):
    """Hands the input and the result of every `Tensor.topk` inside it to a callback."""

    def __init__(self, captured: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._captured = captured

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk:
            self._captured(args[0], result.indices)
        return result


@dataclass
class Oracle:
    """A checkpoint in transformers; tests use it through `greedy`."""

    model_dir: Path
    _model: Any = field(init=False)

    def __post_init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: Sequence[int], num_new_tokens: int) -> OracleRun:
        """Prefills the prompt in one pass, then decodes on the cache; end tokens do not stop it."""
        selections: list[list[OracleSelection]] = [[] for _ in self._layers()]
        token_ids: list[int] = []
        rows: list[torch.Tensor] = []
        step = torch.tensor([list(prompt_token_ids)])
        cache = None
        with self._recording(selections):
            while len(token_ids) < num_new_tokens:
                output = self._model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
                cache = output.cache
                rows.append(output.logits[0, -1].clone())
                token_ids.append(int(rows[-1].argmax()))
                step = torch.tensor([[token_ids[-1]]])
        for layer, own in enumerate(selections):
            if not own:
                selections[layer] = selections[layer - 1]
        return OracleRun(token_ids=token_ids, logits=torch.stack(rows), selections=selections)

    def _layers(self) -> Any:
        return self._model.model.layers

    @contextmanager
    def _recording(self, selections: list[list[OracleSelection]]) -> Iterator[None]:
        """Wraps each indexer so that its scores and its choice land in `selections`."""

        def wrap(layer: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def record(scores: torch.Tensor, indices: torch.Tensor) -> None:
                first = len(selections[layer])
                for row, (row_scores, row_indices) in enumerate(
                    zip(scores[0], indices[0].tolist(), strict=True)
                ):
                    position = first + row
                    visible = frozenset(index for index in row_indices if index <= position)
                    selections[layer].append(
                        OracleSelection(
                            chosen=visible, scores=row_scores[: position + 1].float().clone()
                        )
                    )

            def call(*args: Any, **kwargs: Any) -> torch.Tensor:
                with _CaptureTopk(record):
                    return forward(*args, **kwargs)

            return call

        indexers = [
            (layer, module.self_attn.indexer)
            for layer, module in enumerate(self._layers())
            if module.self_attn.indexer is not None
        ]
        for layer, indexer in indexers:
            indexer.forward = wrap(layer, indexer.forward)
        try:
            yield
        finally:
            for _, indexer in indexers:
                del indexer.forward
