"""Captured steps: equal to eager ones, whatever the padding rows hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.decode_dsa import DsaDecode
from attention_core.paged_kv import PagedKvCache
from attention_core.plan import QuerySpan, build_plan
from decode_service.graph_runner import GraphRunner, StepObserver, graph_batch_sizes
from decode_service.scheduler import DecodeSequence, SequenceId
from decode_service.stop_rule import StopRule
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.request import SamplingParams

BLOCK_SIZE = 8
NUM_BLOCKS = 96
PROMPT_LENS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 150)


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    """The default model."""
    return load_model(recall_dir)


@pytest.fixture
def cache(model: CausalLM) -> PagedKvCache:
    """A cache full of NaN: whatever is read beyond a sequence shows."""
    cache = PagedKvCache.allocate(model.kv_components, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for layer, components in enumerate(cache.components):
        for component in components:
            cache.tensor(layer, component.name).fill_(torch.nan)
    return cache


def make_runner(
    model: CausalLM,
    cache: PagedKvCache,
    *,
    max_graph_batch_size: int,
    observer: StepObserver | None = None,
) -> GraphRunner:
    """A captured runner."""
    device = CpuDevice()
    runner = GraphRunner(
        model=model,
        cache=cache,
        strategy=DsaDecode(model.config.attention, CpuKernels(), device),
        device=device,
        max_graph_batch_size=max_graph_batch_size,
        max_model_len=256,
        observer=observer,
    )
    runner.capture()
    return runner


def prefill(model: CausalLM, cache: PagedKvCache) -> list[DecodeSequence]:
    """Sequences of awkward lengths in scattered blocks, their prompts computed."""
    generator = torch.Generator().manual_seed(7)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    device = CpuDevice()
    strategy = DsaDecode(model.config.attention, CpuKernels(), device)
    sequences = []
    for number, length in enumerate(PROMPT_LENS, start=1):
        block_ids = tuple(free.pop() for _ in range(length // BLOCK_SIZE + 2))
        token_ids = torch.randint(3, model.config.vocab_size, (length,), generator=generator)
        plan = build_plan(
            [QuerySpan(num_queries=length, num_computed=0, block_ids=block_ids)],
            block_size=BLOCK_SIZE,
            rope=model.rope,
        )
        model.forward(token_ids, plan, cache, strategy)
        sequences.append(
            DecodeSequence(
                sequence_id=SequenceId(number),
                num_prompt_tokens=length,
                block_ids=block_ids,
                sampling=SamplingParams(),
                seed=0,
                stop_rule=StopRule(stop_token_ids=frozenset(), min_tokens=0, max_tokens=9),
                last_token_id=3 + number,
            )
        )
    return sequences


@pytest.mark.parametrize(
    ("max_batch_size", "expected"),
    [(0, ()), (1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_graph_batch_sizes_end_at_the_largest(
    max_batch_size: int, expected: tuple[int, ...]
) -> None:
    assert graph_batch_sizes(max_batch_size) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_replay_padded_batch_equals_eager(
    model: CausalLM, cache: PagedKvCache, batch_size: int
) -> None:
    sequences = prefill(model, cache)[-batch_size:]
    replayed = make_runner(model, cache, max_graph_batch_size=8).step(sequences).clone()
    eager = make_runner(model, cache, max_graph_batch_size=0).step(sequences)
    assert replayed.argmax(-1).tolist() == eager.argmax(-1).tolist()
    torch.testing.assert_close(replayed, eager)


def test_replay_of_changing_batches_uses_the_newest_lengths(
    model: CausalLM, cache: PagedKvCache
) -> None:
    sequences = prefill(model, cache)
    runner = make_runner(model, cache, max_graph_batch_size=8)
    eager = make_runner(model, cache, max_graph_batch_size=0)
    for batch in (sequences[:3], sequences, sequences[2:5], sequences[4:]):
        replayed = runner.step(batch).clone()
        torch.testing.assert_close(replayed, eager.step(batch))
        for sequence, token_id in zip(batch, replayed.argmax(-1).tolist(), strict=True):
            sequence.append(token_id)


def test_padding_rows_of_nan_change_no_real_row(model: CausalLM, cache: PagedKvCache) -> None:
    sequences = prefill(model, cache)[-3:]
    expected = make_runner(model, cache, max_graph_batch_size=0).step(sequences)
    # Token 0 fills the padding rows and no real one.
    embedding = model.embedding.clone()
    embedding[0] = torch.nan
    poisoned = dataclasses.replace(model, embedding=embedding)
    runner = make_runner(poisoned, cache, max_graph_batch_size=8)
    found = runner.step(sequences)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


def test_batch_beyond_the_largest_graph_runs_eagerly(model: CausalLM, cache: PagedKvCache) -> None:
    sequences = prefill(model, cache)
    found = make_runner(model, cache, max_graph_batch_size=2).step(sequences)
    expected = make_runner(model, cache, max_graph_batch_size=8).step(sequences)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("max_graph_batch_size", [0, 4])
def test_observer_gets_the_real_rows_of_every_layer(
    model: CausalLM, cache: PagedKvCache, max_graph_batch_size: int
) -> None:
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def observe(layer: int, topk: torch.Tensor, positions: torch.Tensor) -> None:
        seen[layer] = (topk, positions)

    sequences = prefill(model, cache)[-3:]
    runner = make_runner(model, cache, max_graph_batch_size=max_graph_batch_size, observer=observe)
    runner.step(sequences)
    assert sorted(seen) == list(range(model.config.num_layers))
    for topk, positions in seen.values():
        assert positions.tolist() == [sequence.num_tokens - 1 for sequence in sequences]
        for row, sequence in zip(topk.tolist(), sequences, strict=True):
            chosen = [index for index in row if index >= 0]
            assert len(chosen) == min(len(row), sequence.num_tokens)
            assert max(chosen) < sequence.num_tokens
