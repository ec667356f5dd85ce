"""The compute thread with a real model: results, what is pushed, faults."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attention_core.backends.base import Event
from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.paged_kv import PagedKvCache
from attention_core.prefill_dsa_cp import DsaCpPrefill
from kv_transfer.spans import RowRange
from prefill_service.runner import (
    ComputeJob,
    ComputeResult,
    Removed,
    Runner,
    Sampled,
    StepFailed,
    StepStats,
)
from prefill_service.scheduler import JobId
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.request import SamplingParams
from serving_core.sampler import SampleRequest
from tandem.single_process import SingleProcessEngine
from tests.support.prefill_harness import Gate, HookedModel

BLOCK_SIZE = 8
TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def model(recall_dir: Path) -> CausalLM:
    return load_model(recall_dir)


@dataclass(kw_only=True)
class Recorder:
    """Notes what the runner reports, on its thread."""

    results: queue.Queue[ComputeResult] = field(default_factory=queue.Queue)
    fatal: queue.Queue[BaseException] = field(default_factory=queue.Queue)
    steps: list[StepStats] = field(default_factory=list)
    pushes: list[tuple[int, int, RowRange, int]] = field(default_factory=list)

    def pusher(self, job_id: int) -> RecordingPusher:
        return RecordingPusher(recorder=self, job_id=job_id)

    def next_result(self) -> ComputeResult:
        return self.results.get(timeout=TIMEOUT_S)


@dataclass(kw_only=True)
class RecordingPusher:
    recorder: Recorder
    job_id: int

    def submit(self, *, layer: int, rows: RowRange, chunk: int, event: Event) -> None:
        assert event.synchronize(TIMEOUT_S)
        self.recorder.pushes.append((self.job_id, layer, rows, chunk))


@contextmanager
def running(model: CausalLM, recorder: Recorder, *, budget: int = 16) -> Iterator[Runner]:
    runner = Runner(
        model=model,
        cache=PagedKvCache.allocate(model.kv_components, num_blocks=64, block_size=BLOCK_SIZE),
        strategy=DsaCpPrefill(model.config.attention, CpuKernels(), CpuDevice()),
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        on_result=recorder.results.put,
        on_step=recorder.steps.append,
        on_fatal=recorder.fatal.put,
    )
    runner.start()
    try:
        yield runner
    finally:
        assert runner.stop(TIMEOUT_S)


def job_of(recorder: Recorder, job_id: int, num_tokens: int, *, push_from: int = 0) -> ComputeJob:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    first_block = 16 * (job_id - 1)
    return ComputeJob(
        job_id=JobId(job_id),
        token_ids=prompt_of(job_id, num_tokens),
        block_ids=tuple(range(first_block, first_block + num_blocks))[::-1],
        push_from=push_from,
        sampling=SampleRequest(params=SamplingParams(temperature=0), seed=0, position=num_tokens),
        pusher=recorder.pusher(job_id),
    )


def prompt_of(job_id: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((7 * i + 31 * job_id) % 500 + 3 for i in range(num_tokens))


def greedy(model: CausalLM, prompt: tuple[int, ...]) -> int:
    engine = SingleProcessEngine(model, num_blocks=64, block_size=BLOCK_SIZE, chunk_tokens=4096)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return engine.generate(prompt, sampling)[0]


def holding_first(gate: Gate) -> Callable[[int], None]:
    """Holds the first layer of the first step only."""
    is_first = threading.Event()

    def hook(_: int) -> None:
        if not is_first.is_set():
            is_first.set()
            gate.hold()

    return hook


def test_mixed_prompts_are_sampled_as_alone_and_every_row_is_pushed_once(model: CausalLM) -> None:
    recorder, gate = Recorder(), Gate()
    with running(HookedModel.of(model, holding_first(gate)), recorder) as runner:
        runner.add(job_of(recorder, 1, 37))
        runner.add(job_of(recorder, 2, 21, push_from=9))
        runner.add(job_of(recorder, 3, 1))
        gate.open()
        results = {result.job_id: result for result in (recorder.next_result() for _ in range(3))}
    for job_id, num_tokens in ((1, 37), (2, 21), (3, 1)):
        result = results[JobId(job_id)]
        assert isinstance(result, Sampled)
        assert result.token_id == greedy(model, prompt_of(job_id, num_tokens))
        assert result.started_s <= result.sampled_s
    assert sum(step.num_tokens for step in recorder.steps) == 37 + 21 + 1
    assert max(step.num_tokens for step in recorder.steps) <= 16
    assert max(step.num_chunks for step in recorder.steps) > 1
    for job_id, first_row, end in ((1, 0, 37), (2, 9, 21), (3, 0, 1)):
        for layer in range(len(model.layers)):
            pushed = [
                (rows, chunk)
                for job, at, rows, chunk in recorder.pushes
                if (job, at) == (job_id, layer)
            ]
            assert [row for rows, _ in pushed for row in range(rows.start, rows.end)] == list(
                range(first_row, end)
            )
            chunks = [chunk for _, chunk in pushed]
            assert chunks == sorted(set(chunks))


def test_removed_job_leaves_before_the_next_step(model: CausalLM) -> None:
    recorder, gate = Recorder(), Gate()
    with running(HookedModel.of(model, holding_first(gate)), recorder) as runner:
        runner.add(job_of(recorder, 1, 120))
        gate.wait_reached()
        runner.remove(JobId(1))
        runner.add(job_of(recorder, 2, 5))
        gate.open()
        assert recorder.next_result() == Removed(job_id=JobId(1))
        assert recorder.next_result().job_id == 2
    assert recorder.steps[0].num_tokens == 16
    assert sum(step.num_tokens for step in recorder.steps) == 16 + 5


def test_remove_of_a_finished_job_says_nothing(model: CausalLM) -> None:
    recorder = Recorder()
    with running(model, recorder) as runner:
        runner.add(job_of(recorder, 1, 4))
        assert isinstance(recorder.next_result(), Sampled)
        runner.remove(JobId(1))
        runner.add(job_of(recorder, 2, 4))
        assert recorder.next_result().job_id == 2
    assert recorder.results.empty()


def test_failed_step_names_its_layer_and_fails_every_job_in_it(model: CausalLM) -> None:
    recorder, gate = Recorder(), Gate()
    calls: list[int] = []

    def hook(layer: int) -> None:
        if not calls:
            gate.hold()
        calls.append(layer)
        if len(calls) == len(model.layers) + 2:  # layer 1 of the second step
            raise RuntimeError("planned")

    with running(HookedModel.of(model, hook), recorder) as runner:
        runner.add(job_of(recorder, 1, 20))
        runner.add(job_of(recorder, 2, 40))
        runner.add(job_of(recorder, 3, 3))
        gate.open()
        failed = [recorder.next_result() for _ in range(2)]
        assert failed == [
            StepFailed(job_id=JobId(1), layer=1, message="RuntimeError"),
            StepFailed(job_id=JobId(2), layer=1, message="RuntimeError"),
        ]
        third = recorder.next_result()
        assert isinstance(third, Sampled)
        assert third.job_id == 3
    assert recorder.fatal.empty()


def test_failed_sampling_belongs_to_no_layer(model: CausalLM) -> None:
    recorder = Recorder()
    job = job_of(recorder, 1, 4)
    everything = tuple(range(model.config.vocab_size))
    banned = SampleRequest(
        params=job.sampling.params, seed=0, position=4, banned_token_ids=everything
    )
    with running(model, recorder) as runner:
        runner.add(
            ComputeJob(
                job_id=job.job_id,
                token_ids=job.token_ids,
                block_ids=job.block_ids,
                push_from=0,
                sampling=banned,
                pusher=job.pusher,
            )
        )
        assert recorder.next_result() == StepFailed(
            job_id=JobId(1), layer=None, message="ComputeError"
        )


def test_error_of_the_runner_itself_is_fatal(model: CausalLM) -> None:
    recorder = Recorder()
    with running(model, recorder) as runner:
        runner.add(job_of(recorder, 1, 0))  # no caller adds an empty prompt
        assert isinstance(recorder.fatal.get(timeout=TIMEOUT_S), ValueError)
