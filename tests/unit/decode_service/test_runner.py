"""The compute thread: joining, leaving, failing; each sequence leaves exactly once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from decode_service.runner import Removed, Runner, Sampled, StepFailed, StepResult
from decode_service.scheduler import DecodeSequence, SequenceId
from decode_service.stop_rule import FinishReason, StopRule
from serving_core.request import SamplingParams
from tests.support.processes import wait_until

VOCAB_SIZE = 32
TIMEOUT_S = 10.0


class GatedStepper:
    """Predicts token = number of tokens so far; each step waits until the test lets it go."""

    def __init__(self) -> None:
        self.batches: queue.Queue[list[int]] = queue.Queue()
        self.permits = threading.Semaphore(0)
        self.failing: set[int] = set()

    def step(self, sequences: Sequence[DecodeSequence]) -> torch.Tensor:
        """One-hot logits."""
        ids = [int(sequence.sequence_id) for sequence in sequences]
        self.batches.put(ids)
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if self.failing & set(ids):
            raise ValueError("planned")
        logits = torch.zeros(len(sequences), VOCAB_SIZE)
        for row, sequence in enumerate(sequences):
            logits[row, sequence.num_tokens % VOCAB_SIZE] = 1.0
        return logits


class Bench:
    """A runner with its stepper and collected results."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self.stepper = GatedStepper()
        self.results: queue.Queue[StepResult] = queue.Queue()
        self.fatal: list[BaseException] = []
        self.runner = Runner(
            stepper=self.stepper,
            max_num_seqs=max_num_seqs,
            max_num_joined=8,
            on_results=self._collect,
            on_step=lambda stats: None,
            on_fatal=self.fatal.append,
        )

    def _collect(self, results: Sequence[StepResult]) -> None:
        for result in results:
            self.results.put(result)

    def step(self) -> list[int]:
        """Let one step run; returns its batch."""
        self.stepper.permits.release()
        return self.stepper.batches.get(timeout=TIMEOUT_S)

    def result(self) -> StepResult:
        """The next result."""
        return self.results.get(timeout=TIMEOUT_S)


def make_sequence(number: int, *, num_prompt_tokens: int, max_tokens: int) -> DecodeSequence:
    """A greedy sequence without stop ids."""
    return DecodeSequence(
        sequence_id=SequenceId(number),
        num_prompt_tokens=num_prompt_tokens,
        block_ids=(number,),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_rule=StopRule(stop_token_ids=frozenset(), min_tokens=0, max_tokens=max_tokens),
        last_token_id=1,
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A running bench that must end well."""
    one = Bench()
    one.runner.start()
    yield one
    for _ in range(64):
        one.stepper.permits.release()
    assert one.runner.stop(TIMEOUT_S)
    assert one.fatal == []


def test_runner_sequence_samples_until_its_length_and_leaves(bench: Bench) -> None:
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=3))
    assert bench.step() == [1]
    assert bench.result() == Sampled(sequence_id=SequenceId(1), token_id=5, finish=None)
    assert bench.step() == [1]
    assert bench.result() == Sampled(
        sequence_id=SequenceId(1), token_id=6, finish=FinishReason.LENGTH
    )
    assert bench.stepper.batches.empty()


def test_runner_sequence_joins_a_running_batch_at_the_next_step(bench: Bench) -> None:
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=9))
    assert bench.stepper.batches.get(timeout=TIMEOUT_S) == [1]
    bench.runner.join(make_sequence(2, num_prompt_tokens=7, max_tokens=9))  # while 1 computes
    bench.stepper.permits.release()
    assert bench.stepper.batches.get(timeout=TIMEOUT_S) == [1, 2]


def test_runner_leave_is_acknowledged_once_and_only_between_steps(bench: Bench) -> None:
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=9))
    assert bench.stepper.batches.get(timeout=TIMEOUT_S) == [1]
    bench.runner.leave(SequenceId(1))
    assert bench.results.empty()  # the step still writes its blocks
    bench.stepper.permits.release()
    assert bench.result() == Sampled(sequence_id=SequenceId(1), token_id=5, finish=None)
    assert bench.result() == Removed(sequence_id=SequenceId(1))


def test_runner_leave_after_the_end_says_nothing(bench: Bench) -> None:
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=2))
    bench.step()
    assert isinstance(bench.result(), Sampled)
    bench.runner.leave(SequenceId(1))
    bench.runner.join(make_sequence(2, num_prompt_tokens=4, max_tokens=2))
    bench.step()
    assert bench.result().sequence_id == 2


def test_runner_step_that_raises_fails_its_batch_and_lives_on(bench: Bench) -> None:
    bench.stepper.failing = {1}
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=9))
    bench.step()
    assert bench.result() == StepFailed(sequence_id=SequenceId(1), message="ValueError")
    bench.runner.join(make_sequence(2, num_prompt_tokens=4, max_tokens=2))
    bench.step()
    result = bench.result()
    assert isinstance(result, Sampled)
    assert result.finish is FinishReason.LENGTH


def test_runner_min_tokens_bans_stop_ids_until_reached(bench: Bench) -> None:
    sequence = make_sequence(1, num_prompt_tokens=4, max_tokens=9)
    sequence.stop_rule = StopRule(stop_token_ids=frozenset({5, 6}), min_tokens=2, max_tokens=9)
    bench.runner.join(sequence)
    bench.step()
    first = bench.result()
    assert isinstance(first, Sampled)
    assert first.token_id not in (5, 6)
    bench.step()
    assert bench.result() == Sampled(
        sequence_id=SequenceId(1), token_id=6, finish=FinishReason.STOP
    )


def test_runner_broken_callback_is_told_as_fatal() -> None:
    bench = Bench()

    def break_down(results: Sequence[StepResult]) -> None:
        raise OSError("planned")

    bench.runner = Runner(
        stepper=bench.stepper,
        max_num_seqs=1,
        max_num_joined=1,
        on_results=break_down,
        on_step=lambda stats: None,
        on_fatal=bench.fatal.append,
    )
    bench.runner.start()
    bench.runner.join(make_sequence(1, num_prompt_tokens=4, max_tokens=9))
    bench.stepper.permits.release()
    wait_until(lambda: bool(bench.fatal), timeout_s=TIMEOUT_S, what="the fault is told")
    assert bench.runner.stop(TIMEOUT_S)
    assert [type(error) for error in bench.fatal] == [OSError]
