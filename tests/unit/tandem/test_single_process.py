"""The single-process engine: lengths, stops, sampling and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from serving_core.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.request import SamplingParams
from tandem.single_process import SingleProcessEngine

BLOCK_SIZE = 16
NUM_BLOCKS = 8
PROMPT = [5, 90, 17, 300, 41]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Mapping[str, Path]) -> CausalLM:
    return load_model(tiny_checkpoints["glm_shared"])


@pytest.fixture
def engine(model: CausalLM) -> SingleProcessEngine:
    return SingleProcessEngine(model, NUM_BLOCKS, BLOCK_SIZE, 7)


def greedy(**more: object) -> SamplingParams:
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**{**defaults, **more})  # type: ignore[arg-type]


def test_engine_second_request_reuses_the_cache_cleanly(engine: SingleProcessEngine) -> None:
    first = engine.generate(PROMPT, greedy())
    engine.generate(list(range(3, 100)), greedy())
    assert engine.generate(PROMPT, greedy()) == first
    assert len(first) == NUM_TOKENS


def test_engine_blocks_are_not_in_order(engine: SingleProcessEngine) -> None:
    """Rows of the prompt lie where an allocator might have put them, not side by side."""
    engine.generate(list(range(3, 83)), greedy(max_tokens=1))
    latent = engine.cache.layers[0].latent
    used = [block for block in range(NUM_BLOCKS) if latent[block].any()]
    assert len(used) == 5
    assert used != list(range(5))


def test_engine_stop_token_ends_and_is_returned(engine: SingleProcessEngine) -> None:
    everything = engine.generate(PROMPT, greedy())
    stop = everything[4]
    expected = everything[: everything.index(stop) + 1]
    assert engine.generate(PROMPT, greedy(stop_token_ids=(stop,))) == expected


def test_engine_eos_ends_unless_ignored(model: CausalLM, engine: SingleProcessEngine) -> None:
    everything = engine.generate(PROMPT, greedy())
    eos = everything[4]
    config = dataclasses.replace(model.config, eos_token_ids=(eos,))
    ending = SingleProcessEngine(
        dataclasses.replace(model, config=config), NUM_BLOCKS, BLOCK_SIZE, 7
    )
    expected = everything[: everything.index(eos) + 1]
    assert ending.generate(PROMPT, greedy(ignore_eos=False)) == expected
    assert ending.generate(PROMPT, greedy()) == everything


def test_engine_min_tokens_bans_stops_before_it(engine: SingleProcessEngine) -> None:
    stop = engine.generate(PROMPT, greedy())[0]
    tokens = engine.generate(PROMPT, greedy(stop_token_ids=(stop,), min_tokens=5))
    assert stop not in tokens[:5]
    assert len(tokens) >= 5


def test_engine_seed_decides_the_output_whatever_the_chunks(model: CausalLM) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=NUM_TOKENS)
    outputs = [
        SingleProcessEngine(model, NUM_BLOCKS, BLOCK_SIZE, chunk).generate(PROMPT * 8, sampling)
        for chunk in (7, 64)
    ]
    assert outputs[0] == outputs[1]
    other = SamplingParams(temperature=1.0, top_p=0.95, seed=12, max_tokens=NUM_TOKENS)
    engine = SingleProcessEngine(model, NUM_BLOCKS, BLOCK_SIZE, 64)
    assert engine.generate(PROMPT * 8, other) != outputs[0]


def test_engine_without_seed_differs_between_calls(engine: SingleProcessEngine) -> None:
    sampling = SamplingParams(temperature=4.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = {tuple(engine.generate(PROMPT, sampling)) for _ in range(3)}
    assert len(outputs) == 3


def test_engine_without_max_tokens_fills_the_context(engine: SingleProcessEngine) -> None:
    tokens = engine.generate(PROMPT, greedy(max_tokens=None))
    assert len(tokens) == NUM_BLOCKS * BLOCK_SIZE - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], greedy(), "prompt_token_ids"),
        ([3, 512], greedy(), "prompt_token_ids"),
        ([-1], greedy(), "prompt_token_ids"),
        ([3], greedy(temperature=-1.0), "sampling_params.temperature"),
        ([3], greedy(max_tokens=0), "sampling_params.max_tokens"),
    ],
)
def test_engine_bad_request_is_refused_by_name(
    engine: SingleProcessEngine, prompt: list[int], sampling: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(prompt, sampling)
    assert caught.value.field == field


def test_engine_prompt_without_room_is_refused(engine: SingleProcessEngine) -> None:
    full = [3] * (NUM_BLOCKS * BLOCK_SIZE)
    for prompt, max_tokens in ((full, None), (full[:-1], 2), (full + full, 1)):
        with pytest.raises(PromptTooLongError):
            engine.generate(prompt, greedy(max_tokens=max_tokens))
    assert len(engine.generate(full[:-1], greedy(max_tokens=1))) == 1


def test_engine_stop_strings_are_refused(engine: SingleProcessEngine) -> None:
    with pytest.raises(UnsupportedError):
        engine.generate(PROMPT, greedy(stop=("end",)))
