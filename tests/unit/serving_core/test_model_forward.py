"""One step of the model: mixed batches, padding, and the order of its callbacks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.decode_dsa import DsaDecode
from attention_core.paged_kv import LayerKv, PagedKvCache
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.prefill_dsa_cp import DsaCpPrefill
from attention_core.strategy import AttentionOutput, KvWritten, Prolog
from attention_core.weights import NativeWeights
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM

BLOCK_SIZE = 16
NUM_BLOCKS = 24
LENGTHS = [41, 1, 70, 16]
PAD_TOKEN_ID = 0


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Mapping[str, Path]) -> CausalLM:
    """With shared indexers, and NaN for padding tokens, which must reach no other row."""
    loaded = load_model(tiny_checkpoints["glm_shared"])
    embedding = loaded.embedding.clone()
    embedding[PAD_TOKEN_ID] = float("nan")
    return dataclasses.replace(loaded, embedding=embedding)


def new_cache(model: CausalLM) -> PagedKvCache:
    return PagedKvCache.allocate(model.kv_components, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def make_requests() -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and blocks of each request; the last token of each is decoded."""
    rng = random.Random(5)
    token_ids = [[rng.randrange(3, 512) for _ in range(length + 1)] for length in LENGTHS]
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    block_ids: list[list[int]] = []
    for length in LENGTHS:
        needed = length // BLOCK_SIZE + 1
        block_ids.append(blocks[:needed])
        blocks = blocks[needed:]
    return token_ids, block_ids


def run(model: CausalLM, indices: list[int], *, padded: bool) -> tuple[Tensor, Tensor]:
    """Prefills, then decodes one token of, the chosen requests: last hidden states of both."""
    token_ids, block_ids = make_requests()
    cache = new_cache(model)
    shape = model.config.attention
    prefill = DsaCpPrefill(shape, CpuKernels(), CpuDevice())
    decode = DsaDecode(shape, CpuKernels(), CpuDevice())

    def step(lens: list[tuple[int, int]], strategy: DsaCpPrefill | DsaDecode) -> Tensor:
        spans = [
            QuerySpan(num_queries=queries, num_computed=computed, block_ids=block_ids[index])
            for index, (computed, queries) in zip(indices, lens, strict=True)
        ]
        num_tokens = sum(queries for _, queries in lens)
        plan = build_plan(
            spans,
            block_size=BLOCK_SIZE,
            rope=model.rope,
            num_padded_tokens=num_tokens + 3 if padded else None,
            num_padded_requests=len(spans) + 2 if padded else None,
        )
        flat = [
            token_id
            for index, (computed, queries) in zip(indices, lens, strict=True)
            for token_id in token_ids[index][computed : computed + queries]
        ]
        flat += [PAD_TOKEN_ID] * (plan.num_tokens - num_tokens)
        hidden = model.forward(torch.tensor(flat), plan, cache, strategy)
        if padded:
            assert hidden[num_tokens:].isnan().all()
        ends = torch.tensor([queries for _, queries in lens]).cumsum(0) - 1
        return hidden[ends]

    first = step([(0, LENGTHS[index]) for index in indices], prefill)
    second = step([(LENGTHS[index], 1) for index in indices], decode)
    return first, second


@pytest.mark.parametrize("padded", [False, True])
def test_forward_mixed_batch_equals_each_alone(model: CausalLM, padded: bool) -> None:
    together = run(model, [0, 1, 2, 3], padded=padded)
    for index in range(len(LENGTHS)):
        alone = run(model, [index], padded=False)
        for batch_hidden, own_hidden in zip(together, alone, strict=True):
            assert own_hidden.isfinite().all()
            torch.testing.assert_close(batch_hidden[index], own_hidden[0], rtol=1e-4, atol=1e-4)


def test_forward_empty_step_gives_no_rows(model: CausalLM) -> None:
    cache = new_cache(model)
    plan = build_plan([], block_size=BLOCK_SIZE, rope=model.rope)
    strategy = DsaCpPrefill(model.config.attention, CpuKernels(), CpuDevice())
    hidden = model.forward(torch.empty(0, dtype=torch.int64), plan, cache, strategy)
    assert model.logits(hidden).shape == (0, model.config.vocab_size)


class RecordingStrategy:
    """The prefill strategy, noting its calls."""

    def __init__(self, inner: DsaCpPrefill, calls: list[tuple[str, int]]) -> None:
        self._inner = inner
        self._calls = calls
        self.shared: list[Tensor | None] = []
        self.topk: list[Tensor] = []

    def write_kv(
        self, layer: int, hidden: Tensor, weights: NativeWeights, kv: LayerKv, plan: AttentionPlan
    ) -> Prolog:
        self._calls.append(("write_kv", layer))
        return self._inner.write_kv(layer, hidden, weights, kv, plan)

    def attend(
        self,
        prolog: Prolog,
        weights: NativeWeights,
        kv: LayerKv,
        plan: AttentionPlan,
        shared_topk: Tensor | None,
    ) -> AttentionOutput:
        self._calls.append(("attend", prolog.written.layer))
        output = self._inner.attend(prolog, weights, kv, plan, shared_topk)
        self.shared.append(shared_topk)
        self.topk.append(output.topk)
        return output


def test_forward_callbacks_come_between_write_and_attend(model: CausalLM) -> None:
    """A layer's KV is handed on before its attention, which is what makes the push overlap."""
    calls: list[tuple[str, int]] = []
    cache = new_cache(model)
    inner = DsaCpPrefill(model.config.attention, CpuKernels(), CpuDevice())
    strategy = RecordingStrategy(inner, calls)

    def on_kv_written(written: KvWritten) -> None:
        assert written.event.query()
        assert cache.layers[written.layer].latent.any()
        calls.append(("on_kv_written", written.layer))

    span = QuerySpan(num_queries=40, num_computed=0, block_ids=[7, 2, 5])
    model.forward(
        torch.arange(3, 43),
        build_plan([span], block_size=BLOCK_SIZE, rope=model.rope),
        cache,
        strategy,
        on_kv_written=on_kv_written,
        on_topk=lambda layer, _topk: calls.append(("on_topk", layer)),
    )
    steps = ("write_kv", "on_kv_written", "attend", "on_topk")
    assert calls == [(name, layer) for layer in range(model.config.num_layers) for name in steps]
    # Layer 2 has no indexer: it attends to what layer 1 chose.
    assert strategy.shared[2] is strategy.topk[1]
    assert torch.equal(strategy.topk[2], strategy.topk[1])
    assert not torch.equal(strategy.topk[3], strategy.topk[1])
