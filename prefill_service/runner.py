"""The compute thread: owns the running prompts and the model.

Commands come in by a bounded queue and are obeyed between two steps. Each job that was added
leaves with exactly one result, and a result means that the compute thread touches the job's
blocks no more:

    add -> Sampled | Removed | StepFailed
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attention_core.backends.base import Event
from attention_core.paged_kv import PagedKvCache
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.strategy import AttentionStrategy, KvWritten
from kv_transfer.spans import RowRange
from prefill_service.layer_probe import LayerProbe
from prefill_service.scheduler import Chunk, ChunkScheduler, JobId
from serving_core.compute_thread import ComputeThread
from serving_core.model.transformer import CausalLM
from serving_core.sampler import SampleRequest, sample

logger = logging.getLogger(__name__)


TopkObserver = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, chosen keys int32 [T, K], positions int64 [T]) of a step, on the compute thread."""


class ChunkPusher(Protocol):
    """Takes the rows of one job's chunk as soon as their KV is on its way into the cache."""

    def submit(self, *, layer: int, rows: RowRange, chunk: int, event: Event) -> None:
        """Queue the rows for the push; called on the compute thread, for ascending chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeJob:
    """What the compute thread needs to know of a job.

    Attributes:
        job_id: Unique among all jobs of this process.
        token_ids: The whole prompt.
        block_ids: Blocks for all rows of the prompt, in logical order.
        push_from: First token row that is pushed.
        sampling: How to choose the token after the prompt.
        pusher: Where written rows go.
    """

    job_id: JobId
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    push_from: int
    sampling: SampleRequest
    pusher: ChunkPusher


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The prompt is computed; times are of the monotonic clock, in seconds."""

    job_id: JobId
    token_id: int
    started_s: float
    sampled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The job left on command."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step that held the job raised at `layer` (None: outside the layers)."""

    job_id: JobId
    layer: int | None
    message: str


ComputeResult = Sampled | Removed | StepFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did, for metrics."""

    num_tokens: int
    num_chunks: int
    duration_s: float


@dataclass(slots=True, kw_only=True)
class _Running:
    """A job on the compute thread; `started_s` is set with its first chunk."""

    job: ComputeJob
    token_ids: torch.Tensor  # int64 [num_tokens]
    started_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """The command that a job leave."""

    job_id: JobId


class Runner:
    """Runs steps of the model over chunks of several prompts, on a thread of its own."""

    def __init__(
        self,
        *,
        model: CausalLM,
        cache: PagedKvCache,
        strategy: AttentionStrategy,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        on_result: Callable[[ComputeResult], None],
        on_step: Callable[[StepStats], None],
        on_fatal: Callable[[BaseException], None],
        topk_observer: TopkObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the collaborators; nothing runs before `start`.

        Args:
            model: The model; only the compute thread uses it from now on.
            cache: The paged KV cache on this side.
            strategy: How attention is computed.
            max_num_batched_tokens: Token budget of one step.
            max_num_seqs: Most jobs that are added and not yet answered.
            on_result: Called on the compute thread, once per job.
            on_step: Called on the compute thread after each step.
            on_fatal: Called on the compute thread when it ends on an error of its own.
            topk_observer: Is given the chosen keys of each layer, for tests that compare them.
            clock: Monotonic seconds.
        """
        self._model = model
        self._cache = cache
        self._probe = LayerProbe(strategy)
        self._scheduler = ChunkScheduler(max_num_batched_tokens=max_num_batched_tokens)
        self._on_result = on_result
        self._on_step = on_step
        self._topk_observer = topk_observer
        self._clock = clock
        self._running: dict[JobId, _Running] = {}
        self._thread: ComputeThread[ComputeJob | Remove] = ComputeThread(
            name="prefill-compute",
            worker=self,
            # Each job is added once and removed at most once.
            max_commands=2 * max_num_seqs,
            on_fatal=on_fatal,
        )

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    def add(self, job: ComputeJob) -> None:
        """Queue a job behind those that run; never blocks."""
        self._thread.post(job)

    def remove(self, job_id: JobId) -> None:
        """Let a job leave before the next step; never blocks. Too late is harmless."""
        self._thread.post(Remove(job_id=job_id))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its running step; blocks. Returns False if it did not end."""
        return self._thread.stop(timeout_s)

    def is_idle(self) -> bool:
        """Whether no job is here; see Worker."""
        return len(self._scheduler) == 0

    def obey(self, command: ComputeJob | Remove) -> None:
        """Add or remove a job; see Worker."""
        if isinstance(command, ComputeJob):
            self._add(command)
        else:
            self._remove(command.job_id)

    def step(self) -> None:
        """Run one step; see Worker."""
        if chunks := self._scheduler.schedule():
            self._step(chunks)

    def _add(self, job: ComputeJob) -> None:
        self._scheduler.add(job.job_id, len(job.token_ids))
        token_ids = torch.tensor(job.token_ids, dtype=torch.int64)
        self._running[job.job_id] = _Running(job=job, token_ids=token_ids)

    def _remove(self, job_id: JobId) -> None:
        if self._running.pop(job_id, None) is not None:
            self._scheduler.remove(job_id)
            self._on_result(Removed(job_id=job_id))

    def _step(self, chunks: Sequence[Chunk]) -> None:
        """Run one step; an exception of the model ends the jobs of this step, not the service."""
        started_s = self._clock()
        for chunk in chunks:
            running = self._running[chunk.job_id]
            if running.started_s is None:
                running.started_s = started_s
        try:
            token_ids = self._forward(chunks)
        except Exception as error:  # any fault of a model step is this boundary's to report
            self._fail(chunks, error)
        else:
            self._finish([chunk for chunk in chunks if chunk.is_last], token_ids)
        self._on_step(
            StepStats(
                num_tokens=sum(chunk.num_tokens for chunk in chunks),
                num_chunks=len(chunks),
                duration_s=self._clock() - started_s,
            )
        )

    def _forward(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute the chunks; returns the next token of each prompt that is complete."""
        self._probe.leave_layers()
        running = [self._running[chunk.job_id] for chunk in chunks]
        plan = build_plan(
            [
                QuerySpan(
                    num_queries=chunk.num_tokens,
                    num_computed=chunk.start,
                    block_ids=run.job.block_ids,
                )
                for chunk, run in zip(chunks, running, strict=True)
            ],
            block_size=self._cache.block_size,
            rope=self._model.rope,
        )
        token_ids = torch.cat(
            [
                run.token_ids[chunk.start : chunk.end]
                for chunk, run in zip(chunks, running, strict=True)
            ]
        )
        hidden = self._model.forward(
            token_ids,
            plan,
            self._cache,
            self._probe,
            on_kv_written=lambda written: self._push(chunks, written),
            on_topk=self._topk_callback(plan),
        )
        self._probe.leave_layers()
        return self._sample(chunks, running, hidden)

    def _topk_callback(self, plan: AttentionPlan) -> Callable[[int, torch.Tensor], None] | None:
        observer = self._topk_observer
        if observer is None:
            return None
        return lambda layer, topk: observer(layer, topk, plan.positions)

    def _sample(
        self, chunks: Sequence[Chunk], running: Sequence[_Running], hidden: torch.Tensor
    ) -> list[int]:
        """Sample after each prompt's last row of hidden [T, D]."""
        last_rows: list[int] = []
        requests: list[SampleRequest] = []
        num_rows = 0
        for chunk, run in zip(chunks, running, strict=True):
            num_rows += chunk.num_tokens
            if chunk.is_last:
                last_rows.append(num_rows - 1)
                requests.append(run.job.sampling)
        if not last_rows:
            return []
        return sample(self._model.logits(hidden[last_rows]), requests)

    def _push(self, chunks: Sequence[Chunk], written: KvWritten) -> None:
        """Hand the granted rows of one written layer to the push pipeline."""
        for chunk in chunks:
            job = self._running[chunk.job_id].job
            start = max(chunk.start, job.push_from)
            if start < chunk.end:
                job.pusher.submit(
                    layer=written.layer,
                    rows=RowRange(start=start, end=chunk.end),
                    chunk=chunk.index,
                    event=written.event,
                )

    def _finish(self, last_chunks: Sequence[Chunk], token_ids: Sequence[int]) -> None:
        sampled_s = self._clock()
        for chunk, token_id in zip(last_chunks, token_ids, strict=True):
            running = self._running.pop(chunk.job_id)
            assert running.started_s is not None  # set at the start of the job's first step
            self._on_result(
                Sampled(
                    job_id=chunk.job_id,
                    token_id=token_id,
                    started_s=running.started_s,
                    sampled_s=sampled_s,
                )
            )

    def _fail(self, chunks: Sequence[Chunk], error: Exception) -> None:
        layer = self._probe.layer
        logger.error("model step failed layer=%s num_jobs=%d", layer, len(chunks), exc_info=error)
        for chunk in chunks:
            self._scheduler.remove(chunk.job_id)
            del self._running[chunk.job_id]
            self._on_result(
                StepFailed(job_id=chunk.job_id, layer=layer, message=f"{type(error).__name__}")
            )
