"""The router benchmark's figures, and the compute that takes the model's place."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from bench.router.__main__ import StreamRun, added_ms, cpu_figures, longer_messages
from bench.router.free_compute import FreeCompute, Pace
from decode_service.runner import Removed, Sampled, StepResult
from decode_service.scheduler import DecodeSequence, SequenceId
from decode_service.stop_rule import FinishReason, StopRule
from serving_core.request import SamplingParams

TOKEN = 9
WAIT_S = 10.0


class Compute:
    """A compute thread whose results can be waited for."""

    def __init__(self) -> None:
        self.steps: queue.Queue[list[StepResult]] = queue.Queue()
        self.free = FreeCompute(TOKEN, self._take)

    def _take(self, results: Sequence[StepResult]) -> None:
        self.steps.put(list(results))

    def join(self, number: int, max_tokens: int) -> None:
        self.free.join(
            DecodeSequence(
                sequence_id=SequenceId(number),
                num_prompt_tokens=3,
                block_ids=(),
                sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0),
                seed=0,
                stop_rule=StopRule(stop_token_ids=frozenset(), min_tokens=0, max_tokens=max_tokens),
                last_token_id=TOKEN,
            )
        )


def test_free_compute_gives_all_tokens_in_steps_and_one_finish() -> None:
    compute = Compute()
    compute.free.set_pace(Pace(tokens_per_step=4, step_s=0.0))
    compute.join(1, max_tokens=8)  # the first of which comes from prefill
    steps = [compute.steps.get(timeout=WAIT_S) for _ in range(2)]
    assert [len(step) for step in steps] == [4, 3]
    results = [one for step in steps for one in step]
    assert all(isinstance(one, Sampled) and one.token_id == TOKEN for one in results)
    finishes = [one.finish for one in results if isinstance(one, Sampled)]
    assert finishes == [None] * 6 + [FinishReason.LENGTH]


def test_free_compute_sequence_that_leaves_is_removed_once() -> None:
    compute = Compute()
    compute.free.set_pace(Pace(tokens_per_step=1, step_s=0.0))
    compute.join(1, max_tokens=1 << 30)
    compute.steps.get(timeout=WAIT_S)
    compute.free.leave(SequenceId(1))
    while not isinstance((last := compute.steps.get(timeout=WAIT_S))[-1], Removed):
        pass
    assert last == [Removed(sequence_id=SequenceId(1))]
    compute.join(2, max_tokens=2)
    [only] = compute.steps.get(timeout=WAIT_S)
    assert only.sequence_id == SequenceId(2)


def run(num_tokens: int, num_messages: int, servicer_s: float) -> StreamRun:
    return StreamRun(
        num_tokens=num_tokens, num_messages=num_messages, servicer_s=servicer_s, loop_s=0.0
    )


def test_added_ms_is_the_difference_of_the_medians() -> None:
    first_s = {"direct": [0.001, 0.002, 0.5], "routed": [0.004, 0.009, 0.003]}
    assert added_ms(first_s) == pytest.approx(2.0)


def test_cpu_figures_are_medians_per_token() -> None:
    streams = {"cpu_ms_per_token_1": [run(100, 100, s) for s in (0.01, 0.5, 0.02)]}
    assert cpu_figures(streams) == pytest.approx({"cpu_ms_per_token_1": 0.2})


def test_longer_messages_are_a_problem() -> None:
    good = {
        "cpu_ms_per_token_1": [run(1000, 999, 0.1)],
        "cpu_ms_per_token_8": [run(4000, 501, 0.1)],
    }
    assert longer_messages(good) == []
    [problem] = longer_messages(good | {"cpu_ms_per_token_1": [run(1000, 500, 0.1)]})
    assert "2.00 tokens" in problem
