"""A seed decides the tokens: on a pair as in one process, whatever the chunks and neighbours."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest

from serving_core.model.loading import load_model
from serving_core.request import SamplingParams
from tandem.single_process import SingleProcessEngine
from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.pair import PairSettings, running_pair
from tests.support.raw_client import Outcome, greedy_request, run_generate

PROMPT = make_prompt(150, seed=5)
NEIGHBOURS = [make_prompt(40 + 30 * index, seed=index) for index in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("chunk_tokens", "engine"), [(33, "shm"), (512, "shm"), (33, "mooncake")])
def test_seeded_tokens_equal_one_process_alone_and_among_others(
    chunk_tokens: int, engine: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """I11: the first token is sampled on prefill, the others on decode, once each."""
    model_dir = tiny_checkpoints["ds_plain"]
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 123}
    single = SingleProcessEngine(load_model(model_dir), 64, 16, 64)
    truth = single.generate(
        PROMPT,
        SamplingParams(
            temperature=1.0, top_p=0.9, top_k=40, seed=123, max_tokens=20, ignore_eos=True
        ),
    )
    request = greedy_request(PROMPT, 20, **sampling)
    settings = PairSettings(model_dir=model_dir, chunk_tokens=chunk_tokens, engine=engine)
    with running_pair(settings, tmp_path) as p:
        alone = run_generate(p.decode.address, request)
        outcomes: list[Outcome] = []
        threads = [
            threading.Thread(
                target=lambda prompt=prompt: outcomes.append(
                    run_generate(p.decode.address, greedy_request(prompt, 30, temperature=1.0))
                )
            )
            for prompt in NEIGHBOURS
        ]
        for thread in threads:
            thread.start()
        among_others = run_generate(p.decode.address, request)
        for thread in threads:
            thread.join(timeout=60)
        other_seed = run_generate(
            p.decode.address, greedy_request(PROMPT, 20, **{**sampling, "seed": 124})
        )
    assert alone.token_ids == truth
    assert among_others.token_ids == truth
    assert [outcome.status for outcome in outcomes] == [grpc.StatusCode.OK] * len(NEIGHBOURS)
    assert other_seed.token_ids != truth
