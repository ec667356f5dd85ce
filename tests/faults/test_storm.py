"""Many requests at once on small pools, with clients that leave: right answers and whole pools."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from serving_core.model.loading import load_model
from serving_core.request import SamplingParams
from tandem.single_process import SingleProcessEngine
from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.pair import Pair, PairSettings, running_pair
from tests.support.processes import prefill_pool_is_whole, wait_until
from tests.support.raw_client import greedy_request, open_generate, run_generate

NUM_REQUESTS = 48
LONGEST_PROMPT = 300
MAX_TOKENS = 8
BLOCK_SIZE = 16
# Room for little more than the longest request.
NUM_BLOCKS = 24


def leave_after(pair: Pair, prompt: list[int], num_replies: int) -> None:
    """A client that goes away after some replies; 0 leaves at once."""
    with open_generate(pair.decode.address, greedy_request(prompt, MAX_TOKENS)) as call:
        for _ in range(num_replies):
            next(call)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_storm_with_leaving_clients_gives_right_answers_and_leaves_whole_pools(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Every client that stays gets the single process's tokens (I3, I8)."""
    model_dir = tiny_checkpoints["ds_plain"]
    rng = random.Random(7)
    prompts = [make_prompt(rng.randrange(1, LONGEST_PROMPT), seed=i) for i in range(NUM_REQUESTS)]
    stays = [rng.random() < 0.7 for _ in prompts]
    num_replies = [rng.randrange(0, 4) for _ in prompts]
    engine = SingleProcessEngine(load_model(model_dir), 64, BLOCK_SIZE, 64)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    settings = PairSettings(
        model_dir=model_dir,
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=3,
        chunk_tokens=40,
    )
    with running_pair(settings, tmp_path) as pair:

        def ask(index: int) -> list[int] | None:
            if not stays[index]:
                leave_after(pair, prompts[index], num_replies[index])
                return None
            request = greedy_request(prompts[index], MAX_TOKENS)
            outcome = run_generate(pair.decode.address, request)
            assert outcome.status is grpc.StatusCode.OK, outcome
            return outcome.token_ids

        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(ask, range(NUM_REQUESTS)))
        pair.wait_pools_whole(1.0)
        for log in (pair.prefill.log_path, pair.decode.log_path):
            assert " ERROR " not in log.read_text()
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer is not None:
            assert answer == engine.generate(prompt, greedy)
    assert sum(answer is not None for answer in answers) > NUM_REQUESTS // 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_decode_leaves_prefill_whole_and_a_restarted_one_is_served(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """I5, I9: prefill's blocks return, and a new incarnation shakes hands on the same port."""
    prompt = make_prompt(200, seed=1)
    settings = PairSettings(model_dir=tiny_checkpoints["ds_plain"], chunk_tokens=16)
    with running_pair(settings, tmp_path) as pair:
        expected = run_generate(pair.decode.address, greedy_request(prompt, 4)).token_ids
        with open_generate(pair.decode.address, greedy_request(prompt, 400)) as call:
            next(call)
            pair.decode.kill()
        wait_until(
            lambda: prefill_pool_is_whole(pair.prefill.address),
            timeout_s=2.0,
            what="prefill's pool is whole",
        )
        port = pair.decode.port
        pair.decode.args = [
            f"--port={port}" if arg.startswith("--port=") else arg for arg in pair.decode.args
        ]
        pair.decode.start()
        pair.wait_kv_ready()
        after = run_generate(pair.decode.address, greedy_request(prompt, 4))
        assert after.token_ids == expected
        assert pair.prefill.is_running()
        pair.wait_pools_whole(1.0)
