"""A stopped prefill: a status in time, quarantine, and whole pools after it goes on (I1, I6).

Nothing proves a stopped writer quiet, so its blocks must stay out of use until it goes on or dies.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import grpc
import pytest

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.fault_plan import FaultPlan
from tests.support.pair import Pair, PairSettings, running_pair
from tests.support.processes import prefill_status, wait_until
from tests.support.raw_client import greedy_request, open_generate, run_generate

PROMPT = make_prompt(4 * 32 + 3, seed=99)


def prefill_is_pushing(pair: Pair) -> bool:
    """Whether bytes left and a job is active."""
    status = prefill_status(pair.prefill.address)
    return status.num_active_jobs > 0 and status.num_pushed_bytes > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_stopped_prefill_keeps_its_blocks_quarantined_until_it_goes_on_or_dies(
    then: signal.Signals,
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: Callable[[Path, list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    """The client hears within 5 s; the blocks return within 1 s of the end of the stop."""
    model_dir = tiny_checkpoints["ds_plain"]
    settings = PairSettings(
        model_dir=model_dir,
        chunk_tokens=32,
        prefill_module="tests.support.faulty_prefill",
        prefill_env=FaultPlan(write_delay_s=0.05).to_env(),
    )
    with running_pair(settings, tmp_path) as pair:
        request = greedy_request(PROMPT, 6)
        with open_generate(pair.decode.address, request) as call:
            wait_until(lambda: prefill_is_pushing(pair), timeout_s=10, what="the push runs")
            pair.prefill.signal(signal.SIGSTOP)
            stopped_s = monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert monotonic() - stopped_s < 5.0

        refused = run_generate(pair.decode.address, request)
        assert refused.status is grpc.StatusCode.UNAVAILABLE
        assert refused.seconds < 5.0
        assert not pair.decode_pool_is_whole(), "a stopped writer's blocks were given back"

        pair.prefill.signal(then)
        wait_until(pair.decode_pool_is_whole, timeout_s=1.5, what="decode's pool is whole")
        if then is signal.SIGKILL:
            pair.restart_prefill()
        pair.wait_kv_ready()
        after = run_generate(pair.decode.address, request)
        assert after.token_ids == greedy_oracle(model_dir, PROMPT, 6)
        pair.wait_pools_whole(1.0)
