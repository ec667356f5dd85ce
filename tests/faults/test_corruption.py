"""Wrong bytes in flight: caught by the digest, never served; wrong indexer keys change tokens.

I2 and I10 of the design. The second test shows that the oracle comparison can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.e2e.test_pair_equals_oracle import make_prompt
from tests.support.fault_plan import Fault, FaultPlan
from tests.support.pair import PairSettings, running_pair
from tests.support.raw_client import greedy_request, run_generate

PROMPT = make_prompt(4 * 32 + 3, seed=99)


def settings_with(plan: FaultPlan, model_dir: Path) -> PairSettings:
    """A pair whose prefill follows `plan`."""
    return PairSettings(
        model_dir=model_dir,
        chunk_tokens=64,
        prefill_module="tests.support.faulty_prefill",
        prefill_env=plan.to_env(),
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layer", [0, 3])
def test_flipped_byte_on_every_push_is_never_served(
    layer: int, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """No token reaches the client, and the blocks come back."""
    plan = FaultPlan(fault=Fault.FLIP_BYTE, layer=layer)
    with running_pair(settings_with(plan, tiny_checkpoints["ds_plain"]), tmp_path) as pair:
        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 6))
        assert outcome.status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS), outcome
        assert outcome.token_ids == []
        pair.wait_pools_whole(1.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_flipped_byte_is_retried_on_a_fresh_ticket_and_the_answer_is_right(
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: Callable[[Path, list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    """The first push is damaged, the second is not."""
    model_dir = tiny_checkpoints["ds_plain"]
    plan = FaultPlan(fault=Fault.FLIP_BYTE, layer=1, times=1)
    with running_pair(settings_with(plan, model_dir), tmp_path) as pair:
        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 6))
        assert outcome.status is grpc.StatusCode.OK, outcome
        assert outcome.token_ids == greedy_oracle(model_dir, PROMPT, 6)
        pair.wait_pools_whole(1.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_zeroed_indexer_keys_change_the_tokens(
    tiny_checkpoints: dict[str, Path],
    greedy_oracle: Callable[[Path, list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    """Digests agree, since prefill itself sends zeros: only the comparison can notice."""
    model_dir = tiny_checkpoints["ds_plain"]
    plan = FaultPlan(fault=Fault.ZERO_INDEX_KEYS)
    with running_pair(settings_with(plan, model_dir), tmp_path) as pair:
        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 12))
        assert outcome.status is grpc.StatusCode.OK, outcome
        assert outcome.token_ids != greedy_oracle(model_dir, PROMPT, 12)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layer", [0, 3])
def test_failed_write_ends_in_a_status_that_names_the_layer(
    layer: int, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """I6: no token, the right status, and the layer in its text."""
    plan = FaultPlan(fault=Fault.FAIL_WRITE, layer=layer)
    with running_pair(settings_with(plan, tiny_checkpoints["ds_plain"]), tmp_path) as pair:
        outcome = run_generate(pair.decode.address, greedy_request(PROMPT, 6))
        assert outcome.status is grpc.StatusCode.UNAVAILABLE, outcome
        assert f"layer {layer}" in outcome.details
        assert outcome.seconds < 2.0
        assert outcome.token_ids == []
        pair.wait_pools_whole(1.0)
