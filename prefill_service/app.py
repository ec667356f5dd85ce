"""Builds the prefill service: everything is made here and passed in.

gRPC loop thread    servicer -> jobs -> admission (block pool), sessions, tickets
compute thread      runner -> model -> on_kv_written
push threads        one pipeline per decode session
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.paged_kv import PagedKvCache
from attention_core.prefill_dsa_cp import DsaCpPrefill
from kv_transfer.engine.base import TransferEngine, WriterLink
from kv_transfer.layout import KvLayout, RegionMap, StagingMap
from kv_transfer.sender import PushLimits, PushPipeline
from kv_transfer.session import JobState
from prefill_service.admission import Admission
from prefill_service.job import PrefillJob
from prefill_service.jobs import RANK, JobCoordinator, JobLimits
from prefill_service.kv_push import SessionPusher
from prefill_service.runner import ComputeResult, Runner, StepStats, TopkObserver
from prefill_service.servicer import Identity, PrefillServicer
from prefill_service.sessions import SessionTable
from prefill_service.ticket_book import TicketBook
from prefill_service.validation import PromptLimits
from serving_core.block_pool import BlockPool
from serving_core.config import PrefillConfig
from serving_core.errors import ComputeError
from serving_core.kv_engines import make_engine
from serving_core.kv_regions import kv_layout, source_region
from serving_core.model.config import DTYPES
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.rpc.interceptors import ErrorInterceptor
from serving_core.rpc.server import KV, READY, ServiceHealth, build_server
from serving_core.telemetry import MetricsServer, PrefillMetrics
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.PrefillService"
_OUTBOX_CAPACITY = 65536
_START_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 10.0
_RETRY_AFTER_S = 0.5
_MIN_KEEP_TICKETS_S = 60.0
_MAX_GRAVES = 65536
_REAP_INTERVAL_S = 0.2
_STOP_TIMEOUT_S = 5.0


class MetricsObserver:
    """Puts what happens to jobs and steps into the metrics."""

    def __init__(self, metrics: PrefillMetrics) -> None:
        self._metrics = metrics

    def bytes_pushed(self, num_bytes: int) -> None:
        """Count written bytes."""
        self._metrics.pushed_bytes.inc(num_bytes)

    def job_sampled(self, job: PrefillJob, *, queue_time_s: float, compute_time_s: float) -> None:
        """Note the times of a computed prompt."""
        self._metrics.prompt_tokens.inc(job.request.num_tokens)
        self._metrics.queue_seconds.observe(queue_time_s)
        self._metrics.compute_seconds.observe(compute_time_s)

    def job_ended(self, job: PrefillJob, state: JobState) -> None:  # noqa: ARG002 - the protocol's
        """Count the outcome."""
        self._metrics.job_ended(state.value)

    def step_done(self, stats: StepStats) -> None:
        """Note the time of a step; called on the compute thread."""
        self._metrics.step_seconds.observe(stats.duration_s)


class PrefillApp:
    """The running service; `build` makes it."""

    def __init__(
        self,
        config: PrefillConfig,
        model: CausalLM,
        engine: TransferEngine,
        topk_observer: TopkObserver | None = None,
    ) -> None:
        self._topk_observer = topk_observer
        self._config = config
        self._model = model
        self._engine = engine
        self._metrics = PrefillMetrics(config.served_model_name)
        self._observer = MetricsObserver(self._metrics)
        self._cache = PagedKvCache.allocate(
            model.kv_components, num_blocks=config.num_kv_blocks, block_size=config.block_size
        )
        self._layout = kv_layout(model, config.block_size, model.fingerprint)
        self._source = source_region(self._cache)
        self._pool = BlockPool(config.num_kv_blocks)
        self._incarnation = secrets.token_hex(16)
        self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="prefill-blocking")
        self._health = ServiceHealth()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._fault: BaseException | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port on which decode services are served; after `start`."""
        return self._bound.address

    async def start(self) -> None:
        """Serve.

        Raises:
            ConfigError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._runner = self._make_runner(loop)
        self._jobs = self._make_jobs()
        self._sessions = self._make_sessions(loop)
        servicer = PrefillServicer(
            identity=Identity(
                prefill_incarnation=self._incarnation,
                layout=self._layout,
                engine_name=self._engine.name,
                can_fence_writer=self._engine.can_fence_writer,
                limits=self._prompt_limits(),
            ),
            sessions=self._sessions,
            jobs=self._jobs,
            pool=self._pool,
            start_timeout_s=_START_TIMEOUT_S,
            write_timeout_s=_WRITE_TIMEOUT_S,
        )
        self._bound = build_server(
            self._config,
            interceptors=[ErrorInterceptor(self._metrics)],
            service_health=self._health,
            service_names=[SERVICE_NAME],
        )
        self._server = self._bound.server
        pb_grpc.add_PrefillServiceServicer_to_server(servicer, self._server)
        self._metrics_server = (
            MetricsServer(self._metrics.registry, self._config.metrics_port)
            if self._config.metrics_port
            else None
        )
        self._runner.start()
        watch = asyncio.create_task(self._watch())
        watch.add_done_callback(self._on_watch_ended)
        self._tasks.append(watch)
        await self._health.start()
        await self._server.start()
        await self._health.set(READY, True)

    async def wait(self) -> None:
        """Return when `stop` was called or the service cannot go on.

        Raises:
            ComputeError: The compute thread, or the watch over peers and blocks, has failed.
        """
        await self._ended.wait()
        if self._fault is not None:
            raise ComputeError("the service cannot go on") from self._fault

    async def stop(self) -> None:
        """Refuse new requests, let running ones end within the grace time, and stop. Idempotent.

        Whoever asks, all of them wait for the same end.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._ended.set()
        await self._health.stop()
        # Without its compute thread the service cannot finish anything.
        grace_s = self._config.drain_grace_s if self._fault is None else 0.0
        if not await self._jobs.drain(grace_s):
            logger.error("some jobs did not end in time")
        await self._server.stop(grace=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sessions.close(_STOP_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._executor, self._runner.stop, _STOP_TIMEOUT_S):
            logger.error("the compute thread did not end in time")
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._metrics_server is not None:
            self._metrics_server.close()

    def _prompt_limits(self) -> PromptLimits:
        config, model = self._config, self._model.config
        longest = min(model.max_position_embeddings, config.num_kv_blocks * config.block_size)
        if config.max_model_len:
            longest = min(longest, config.max_model_len)
        return PromptLimits(vocab_size=model.vocab_size, max_prompt_tokens=longest)

    def _make_runner(self, loop: asyncio.AbstractEventLoop) -> Runner:
        def on_result(result: ComputeResult) -> None:
            loop.call_soon_threadsafe(self._jobs.on_compute_result, result)

        def on_fatal(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._set_fault, error)

        return Runner(
            model=self._model,
            cache=self._cache,
            strategy=DsaCpPrefill(self._model.config.attention, CpuKernels(), CpuDevice()),
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_num_seqs=self._config.max_num_seqs,
            on_result=on_result,
            on_step=self._observer.step_done,
            on_fatal=on_fatal,
            topk_observer=self._topk_observer,
        )

    def _make_jobs(self) -> JobCoordinator:
        config = self._config
        return JobCoordinator(
            prefill_incarnation=self._incarnation,
            layout=self._layout,
            admission=Admission(
                self._pool,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_queued=config.max_queued_requests,
                retry_after_s=_RETRY_AFTER_S,
            ),
            compute=self._runner,
            tickets=TicketBook(
                keep_s=self._keep_tickets_s(), max_graves=_MAX_GRAVES, clock=monotonic
            ),
            limits=JobLimits(
                grant_timeout_s=config.grant_timeout_s,
                drain_timeout_s=config.drain_timeout_s,
                outbox_capacity=_OUTBOX_CAPACITY,
            ),
            observer=self._observer,
            clock=monotonic,
        )

    def _make_sessions(self, loop: asyncio.AbstractEventLoop) -> SessionTable:
        return SessionTable(
            engine=self._engine,
            prefill_incarnation=self._incarnation,
            make_pusher=partial(self._make_pusher, loop),
            on_dead=self._jobs.fail_session,
            executor=self._executor,
            block_size=self._config.block_size,
            max_num_sessions=self._config.max_decode_sessions,
            connect_timeout_s=self._config.connect_timeout_s,
        )

    def _make_pusher(
        self, loop: asyncio.AbstractEventLoop, link: WriterLink, target: RegionMap | StagingMap
    ) -> SessionPusher:
        config = self._config
        pipeline = PushPipeline(
            link=link,
            source=self._source,
            target=target,
            layout=self._layout,
            rank=RANK,
            limits=PushLimits(
                max_jobs=config.max_num_seqs,
                max_queued_chunks=config.num_kv_blocks * config.block_size,
                event_timeout_s=config.event_timeout_s,
                buried_s=self._keep_tickets_s(),
                max_buried=_MAX_GRAVES,
            ),
        )
        return SessionPusher(
            pipeline=pipeline,
            link=link,
            loop=loop,
            rank=RANK,
            close_timeout_s=_STOP_TIMEOUT_S,
        )

    def _keep_tickets_s(self) -> float:
        """How long an ended ticket is refused: longer than any stream waits for its Grant."""
        return max(_MIN_KEEP_TICKETS_S, 2 * self._config.grant_timeout_s)

    def _set_fault(self, error: BaseException) -> None:
        self._fault = error
        self._ended.set()

    def _on_watch_ended(self, watch: asyncio.Task[None]) -> None:
        """A service that no longer sees its peers die, or lost a block, must not go on."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._set_fault(error)

    async def _watch(self) -> None:
        """Reap dead decode services, and keep signals and gauges true."""
        total = self._pool.num_total
        while True:
            self._sessions.reap_dead()
            await self._health.set(KV, len(self._sessions) > 0 and self._stopping is None)
            self._metrics.num_requests_waiting.set(self._jobs.num_queued)
            self._metrics.num_requests_running.set(self._jobs.num_active)
            used = total - self._pool.num_free - self._pool.num_evictable
            self._metrics.kv_cache_usage.set(used / total)
            if self._jobs.num_queued + self._jobs.num_active == 0:
                self._pool.check_integrity()
            await asyncio.sleep(_REAP_INTERVAL_S)


EngineFactory = Callable[[PrefillConfig, KvLayout], TransferEngine]


def build(
    config: PrefillConfig,
    *,
    engine_factory: EngineFactory | None = None,
    model: CausalLM | None = None,
    topk_observer: TopkObserver | None = None,
) -> PrefillApp:
    """Load the model and make the service; nothing runs before `start`.

    Args:
        config: The configuration.
        engine_factory: Makes the transfer engine; None takes the configured one.
        model: A loaded model; None loads the configured one.
        topk_observer: Is given the chosen keys of each step, for tests that compare them.

    Raises:
        CheckpointError: The model cannot be loaded.
        ConfigError: A setting does not fit the model.
    """
    torch.set_num_threads(config.num_threads)
    if model is None:
        dtype = None if config.dtype == "auto" else DTYPES[config.dtype]
        model = load_model(Path(config.model), dtype=dtype)
    if engine_factory is None:
        engine = make_engine(config)
    else:
        engine = engine_factory(config, kv_layout(model, config.block_size, model.fingerprint))
    return PrefillApp(config, model, engine, topk_observer)
