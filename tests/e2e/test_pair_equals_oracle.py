"""Greedy tokens of a real pair equal transformers, for both families, at every edge length."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pair import Pair, PairSettings, running_pair

BLOCK_SIZE = 16
NUM_NEW_TOKENS = 12
TOPK = 32
VOCAB_SIZE = 512
EDGE_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * TOPK + 3]

GreedyOracle = Callable[[Path, list[int], int], list[int]]


def make_prompt(length: int, seed: int) -> list[int]:
    """Random tokens without the special ones."""
    rng = random.Random(seed * 7919 + length)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def complete(pair: Pair, prompt: list[int], max_tokens: int = NUM_NEW_TOKENS) -> list[int]:
    """Greedy tokens from the pair."""
    with pair.client() as client:
        result = client.complete(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return list(result.token_ids)


# Slots for a few rows each, so that items are cut and slots go round many times.
SMALL_SLOTS = ("--kv-slot-bytes=8192", "--kv-staging-bytes=65536")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "engine",
    [("shm", ()), ("mooncake", ()), ("mooncake", SMALL_SLOTS)],
    ids=["shm", "mooncake", "mooncake-small-slots"],
)
@pytest.mark.parametrize(
    ("checkpoint", "chunk_tokens"),
    [
        ("ds_plain", 7),
        ("ds_plain", 2048),
        ("ds_yarn", 48),
        ("glm_plain", 33),
        ("glm_shared", 7),
        ("glm_shared", 2048),
    ],
)
def test_pair_greedy_tokens_equal_transformers(  # noqa: PLR0917
    checkpoint: str,
    chunk_tokens: int,
    engine: tuple[str, tuple[str, ...]],
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: GreedyOracle,
    tmp_path: Path,
) -> None:
    """One at a time, then all at once so that sequences join and leave the running batch."""
    model_dir = tiny_checkpoints[checkpoint]
    prompts = [make_prompt(length, seed) for seed, length in enumerate(EDGE_LENGTHS)]
    # Different lengths of output make sequences leave at different steps.
    max_tokens = [NUM_NEW_TOKENS - index for index in range(len(prompts))]
    expected = [
        greedy_oracle(model_dir, prompt, limit)
        for prompt, limit in zip(prompts, max_tokens, strict=True)
    ]
    settings = PairSettings(
        model_dir=model_dir,
        block_size=BLOCK_SIZE,
        chunk_tokens=chunk_tokens,
        max_num_seqs=4,
        engine=engine[0],
        decode_args=engine[1],
    )
    with running_pair(settings, tmp_path) as pair:
        for prompt, limit, tokens in zip(prompts, max_tokens, expected, strict=True):
            assert complete(pair, prompt, limit) == tokens, f"prompt of {len(prompt)} tokens"
        assert run_together(pair, prompts, max_tokens) == expected
        pair.wait_pools_whole(2.0)


def run_together(pair: Pair, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
    """Sends all prompts at once and returns their tokens in order."""
    results: list[list[int]] = [[] for _ in prompts]

    def run(index: int) -> None:
        results[index] = complete(pair, prompts[index], max_tokens[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results
