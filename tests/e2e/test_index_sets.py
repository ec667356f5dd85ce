"""The keys that both services choose equal those that transformers chooses (I10).

On decode the choice is made from indexer keys that were pushed; tokens alone could hide a wrong
one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_pair_equals_oracle import NUM_NEW_TOKENS, TOPK, complete, make_prompt
from tests.support.oracle import Oracle
from tests.support.pair import PairSettings, running_pair
from tests.support.recording_service import read_selections

PROMPT = make_prompt(4 * TOPK + 3, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("checkpoint", "engine"),
    [
        ("ds_plain", "shm"),
        ("ds_yarn", "shm"),
        ("glm_plain", "shm"),
        ("glm_shared", "shm"),
        ("ds_yarn", "mooncake"),
        ("glm_shared", "mooncake"),
    ],
)
def test_chosen_keys_of_both_services_equal_transformers(
    checkpoint: str,
    engine: str,
    tiny_checkpoints: dict[str, Path],
    oracle_of: Callable[[Path], Oracle],
    tmp_path: Path,
) -> None:
    """Every layer and position: prompt rows on prefill, generated rows on decode."""
    model_dir = tiny_checkpoints[checkpoint]
    logs = {role: tmp_path / f"{role}.jsonl" for role in ("prefill", "decode")}
    settings = PairSettings(
        model_dir=model_dir,
        chunk_tokens=48,
        engine=engine,
        prefill_module="tests.support.recording_service",
        decode_module="tests.support.recording_service",
        prefill_first_args=["prefill", str(logs["prefill"])],
        decode_first_args=["decode", str(logs["decode"])],
    )
    truth = oracle_of(model_dir).greedy(PROMPT, NUM_NEW_TOKENS)
    with running_pair(settings, tmp_path) as pair:
        assert complete(pair, PROMPT) == truth.token_ids
    chosen = {role: read_selections(log) for role, log in logs.items()}
    num_layers = len(truth.selections)
    # The last new token is sampled but never computed on.
    num_computed = len(PROMPT) + NUM_NEW_TOKENS - 1
    layers = {layer for layer, _ in chosen["prefill"]}
    assert layers, "prefill recorded nothing"
    assert layers == {layer for layer, _ in chosen["decode"]}
    assert max(layers) < num_layers
    for layer in layers:
        for position in range(num_computed):
            role = "prefill" if position < len(PROMPT) else "decode"
            ours = chosen[role][layer, position]
            assert truth.selections[layer][position].accepts(ours), (role, layer, position)
            assert len(ours) == min(TOPK, position + 1)
