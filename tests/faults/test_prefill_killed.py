"""kill -9 of prefill while it pushes: a status in time, whole pools, and service after a restart.

I1 (no reuse before the writer is proven gone), I3, I6 and I13 of the design.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.fault_plan import Fault, FaultPlan
from tests.support.pair import PairSettings, running_pair
from tests.support.processes import wait_until
from tests.support.raw_client import greedy_request, run_generate

NUM_LAYERS = 4
PROMPT = make_prompt(4 * 32 + 3, seed=99)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layer", [0, NUM_LAYERS // 2, NUM_LAYERS - 1])
def test_prefill_killed_while_pushing_a_layer_ends_in_unavailable_and_recovers(
    layer: int,
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: Callable[[Path, list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    """The next request after a restart on the same port succeeds with the same decode process."""
    model_dir = tiny_checkpoints["ds_plain"]
    armed = tmp_path / "armed"
    plan = FaultPlan(fault=Fault.KILL_SELF, layer=layer, arm_file=str(armed))
    settings = PairSettings(
        model_dir=model_dir,
        chunk_tokens=64,
        prefill_module="tests.support.faulty_prefill",
        prefill_env=plan.to_env(),
    )
    expected = greedy_oracle(model_dir, PROMPT, 6)
    with running_pair(settings, tmp_path) as pair:
        assert run_generate(pair.decode.address, greedy_request(PROMPT, 6)).token_ids == expected
        decode_pid = pair.decode.pid
        armed.touch()

        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 6))

        assert outcome.status is grpc.StatusCode.UNAVAILABLE, outcome
        assert outcome.seconds < 2.0
        assert outcome.token_ids == []
        wait_until(lambda: not pair.prefill.is_running(), timeout_s=1.0, what="the kill")
        wait_until(pair.decode_pool_is_whole, timeout_s=1.0, what="decode's pool is whole")

        armed.unlink()
        pair.restart_prefill()
        pair.wait_kv_ready()
        after = run_generate(pair.decode.address, greedy_request(PROMPT, 6))
        assert after.token_ids == expected
        assert pair.decode.pid == decode_pid
        assert pair.decode.is_running()
        pair.wait_pools_whole(1.0)
