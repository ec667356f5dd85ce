"""A client that goes away in each phase leaves both pools whole within a second (I3, I1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.fault_plan import FaultPlan
from tests.support.pair import Pair, PairSettings, running_pair
from tests.support.processes import prefill_status, wait_until
from tests.support.raw_client import greedy_request, open_generate, run_generate

PROMPT = make_prompt(4 * 32 + 3, seed=99)


def slow_pair(model_dir: Path, *, write_delay_s: float, max_num_seqs: int = 8) -> PairSettings:
    """A pair whose pushes take long enough to be interrupted."""
    return PairSettings(
        model_dir=model_dir,
        chunk_tokens=32,
        max_num_seqs=max_num_seqs,
        prefill_module="tests.support.faulty_prefill",
        prefill_env=FaultPlan(write_delay_s=write_delay_s).to_env(),
    )


def prefill_is_pushing(pair: Pair) -> bool:
    """Whether bytes left and a job is active."""
    status = prefill_status(pair.prefill.address)
    return status.num_active_jobs > 0 and status.num_pushed_bytes > 0


def prefill_holds_a_queued_job(pair: Pair) -> bool:
    """Whether a job waits."""
    return prefill_status(pair.prefill.address).num_queued_jobs > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_disconnect_while_pushing_frees_both_pools(
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: Callable[[Path, list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    """The push is slow, the client leaves in the middle, and the next request is served."""
    model_dir = tiny_checkpoints["ds_plain"]
    with running_pair(slow_pair(model_dir, write_delay_s=0.05), tmp_path) as pair:
        with open_generate(pair.decode.address, greedy_request(PROMPT, 6)):
            wait_until(lambda: prefill_is_pushing(pair), timeout_s=10, what="the push runs")
        pair.wait_pools_whole(1.0)
        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 6))
        assert outcome.token_ids == greedy_oracle(model_dir, PROMPT, 6)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_disconnect_while_queued_on_prefill_frees_both_pools(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """One slow request occupies prefill; the one behind it is cancelled in the queue."""
    settings = slow_pair(tiny_checkpoints["ds_plain"], write_delay_s=0.05, max_num_seqs=1)
    with running_pair(settings, tmp_path) as pair:
        first = greedy_request(PROMPT, 6, request_id="same")
        with open_generate(pair.decode.address, first):
            wait_until(lambda: prefill_is_pushing(pair), timeout_s=10, what="the push runs")
            with open_generate(pair.decode.address, first):
                wait_until(
                    lambda: prefill_holds_a_queued_job(pair), timeout_s=10, what="one queues"
                )
            wait_until(
                lambda: not prefill_holds_a_queued_job(pair), timeout_s=1.0, what="queue empties"
            )
        pair.wait_pools_whole(1.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_disconnect_while_decoding_frees_both_pools(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The client leaves after some tokens of a long answer."""
    settings = PairSettings(model_dir=tiny_checkpoints["ds_plain"], num_kv_blocks=1024)
    with running_pair(settings, tmp_path) as pair:
        with open_generate(pair.decode.address, greedy_request(PROMPT, 1500)) as call:
            for _ in range(3):
                next(call)
            assert not pair.decode_pool_is_whole()
        pair.wait_pools_whole(1.0)
