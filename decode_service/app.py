"""Builds the decode service from its configuration, and starts and stops it.

    build -> start -> (wait) -> stop

`build` loads the model, takes the memory and captures the decode steps; it blocks. Everything else
runs on the event loop that calls `start`.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from decode_service.block_queue import BlockQueue
from decode_service.circuit_breaker import BreakerSettings
from decode_service.coordinator import CoordinatorLimits, RequestCoordinator
from decode_service.graph_runner import GraphRunner, StepObserver
from decode_service.handoff import HandoffTools
from decode_service.kv_memory import EngineFactory, KvMemory, make_kv_memory
from decode_service.kv_receive import KvReceiver
from decode_service.landings import make_landings
from decode_service.loop_mailbox import LoopMailbox
from decode_service.peers_file import PeersFile
from decode_service.prefill_peer import PROTOCOL_VERSION, PeerState, PrefillPeer
from decode_service.prefill_pool import PrefillPool
from decode_service.request_parsing import RequestLimits
from decode_service.request_reader import ReaderDefaults, RequestReader
from decode_service.retry_budget import RetryBudget
from decode_service.runner import Runner, StepResult, StepStats
from decode_service.served_model import (
    ServedModel,
    load_served_model,
    make_stepper,
    model_info,
)
from decode_service.service_info import ServiceInfo
from decode_service.servicer import DecodeServicer
from decode_service.ticket_revoker import TicketRevoker
from kv_transfer.session import ReservationState
from serving_core.block_pool import BlockPool
from serving_core.config import DecodeConfig
from serving_core.errors import ComputeError
from serving_core.kv_engines import make_engine
from serving_core.model.transformer import CausalLM
from serving_core.rpc import wire
from serving_core.rpc.client import open_channel
from serving_core.rpc.interceptors import ErrorInterceptor
from serving_core.rpc.server import KV, READY, BoundServer, ServiceHealth, build_server
from serving_core.telemetry import DecodeMetrics, MetricsServer
from serving_core.tokenizer import Tokenizer
from tandem.v1 import prefill_service_pb2 as pb

logger = logging.getLogger(__name__)

_SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_NUM_EXECUTOR_THREADS = 2  # digests and tokenizing; the compute thread has its own
_WRITE_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 1.0
_STOP_TIMEOUT_S = 5.0
_INTEGRITY_CHECK_DELAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What `build` made."""

    config: DecodeConfig
    served: ServedModel
    memory: KvMemory
    stepper: GraphRunner
    metrics: DecodeMetrics


def build(
    config: DecodeConfig,
    *,
    engine_factory: EngineFactory | None = None,
    model: CausalLM | None = None,
    step_observer: StepObserver | None = None,
) -> "App":
    """Make the service; blocks while the model loads.

    Args:
        config: The configuration.
        engine_factory: Makes the transfer engine; None takes the configured one.
        model: Taken instead of loading the weights again, for tests.
        step_observer: Is given (layer, chosen keys [T, K], positions [T]) after each decode step,
            on the compute thread.

    Raises:
        StartupError: The configuration or the checkpoint is wrong.
        KvTransferError: The memory cannot be had.
    """
    torch.set_num_threads(config.num_threads)
    served = load_served_model(config, model)
    engine = (engine_factory or make_engine)(config)
    memory = make_kv_memory(config, served.model, engine, clock=time.monotonic)
    stepper = make_stepper(config, served, memory.cache, step_observer)
    metrics = DecodeMetrics(config.served_model_name)
    pool = memory.pool
    metrics.kv_cache_usage.set_function(lambda: 1.0 - pool.num_free / pool.num_total)
    metrics.quarantined_blocks.set_function(lambda: float(pool.num_quarantined))
    return App(
        _Parts(config=config, served=served, memory=memory, stepper=stepper, metrics=metrics)
    )


class App:
    """The running service. All methods are for one event loop."""

    def __init__(self, parts: _Parts) -> None:
        """Use `build`."""
        self._parts = parts
        self._config = parts.config
        self._memory = parts.memory
        self._executor = ThreadPoolExecutor(_NUM_EXECUTOR_THREADS, thread_name_prefix="decode-io")
        self._health = ServiceHealth()
        self._health_changed = asyncio.Event()
        self._is_ready = False
        self._ended = asyncio.Event()
        self._fatal: BaseException | None = None
        self._metrics_server: MetricsServer | None = None
        self._peers_file_task: asyncio.Task[None] | None = None
        self._blocks = BlockQueue(
            parts.memory.pool,
            max_waiting=parts.config.max_queued_requests,
            retry_after_s=_RETRY_AFTER_S,
        )
        self._peers = PrefillPool(
            make_peer=self._make_peer,
            num_quarantined_blocks=parts.memory.table.num_quarantined_blocks,
            num_ending_tickets=self._num_ending_tickets,
            max_quarantined_blocks=parts.memory.max_quarantined_blocks,
            wait_s=parts.config.prefill_wait_s,
            breaker=BreakerSettings(),
            metrics=parts.metrics,
            on_can_move_kv=lambda _: self._health_changed.set(),
            clock=time.monotonic,
        )
        self._landings = make_landings(
            parts.config,
            parts.memory,
            self._blocks,
            on_quarantine=self._peers.peer_changed,
            on_fence=parts.metrics.kv_fences.inc,
        )
        self._revoker = TicketRevoker(revoke_timeout_s=parts.config.revoke_timeout_s)

    @property
    def address(self) -> str:
        """host:port on which clients are served; after `start`."""
        return self._bound.address

    @property
    def pool(self) -> BlockPool:
        """The block pool, to be looked at."""
        return self._memory.pool

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._parts.served.tokenizer

    @property
    def num_pushed_row_bytes(self) -> int:
        """Bytes of one token's rows, summed over layers and components."""
        layers = self._memory.layout.layers
        return sum(part.row_bytes for layer in layers for part in layer.components)

    async def start(self) -> None:
        """Serve.

        Raises:
            ConfigError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._mailbox: LoopMailbox[StepResult] = LoopMailbox(loop, self._on_results)

        def on_fatal(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._on_fatal, error)

        max_open = self._config.max_num_seqs + self._config.max_queued_requests
        self._runner = Runner(
            stepper=self._parts.stepper,
            max_num_seqs=self._config.max_num_seqs,
            max_num_joined=max_open,
            on_results=self._mailbox.post,
            on_step=self._on_step,
            on_fatal=on_fatal,
        )
        self._coordinator = self._make_coordinator(max_open)
        self._bound = self._bind()
        if self._config.metrics_port:
            self._metrics_server = MetricsServer(
                self._parts.metrics.registry, self._config.metrics_port
            )
        self._runner.start()
        await self._health.start()
        self._health_task = asyncio.create_task(self._report_health())
        await self._start_peers()
        await self._bound.server.start()
        self._set_ready(True)

    async def wait(self) -> None:
        """Return when `stop` was called or the service cannot go on.

        Raises:
            ComputeError: The compute thread ended on an error.
        """
        await self._ended.wait()
        if self._fatal is not None:
            raise ComputeError("the compute thread has ended") from self._fatal

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish within the grace, and end. Idempotent."""
        self._set_ready(False)
        self._ended.set()
        await self._coordinator.drain(self._config.drain_grace_s)
        await self._bound.server.stop(_STOP_TIMEOUT_S)
        if not await self._revoker.stop(_STOP_TIMEOUT_S):
            logger.warning("writers of some tickets are not proven quiet; their blocks die with us")
        if self._peers_file_task is not None:
            self._peers_file_task.cancel()
        await self._peers.stop()
        self._health_task.cancel()
        if not await asyncio.to_thread(self._runner.stop, _STOP_TIMEOUT_S):
            logger.error("the compute thread did not end within %.1f s", _STOP_TIMEOUT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._memory.pool.check_integrity()
        await self._landings.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
            self._metrics_server = None

    async def _start_peers(self) -> None:
        """Take the peers of the configuration and follow the file of more of them.

        Raises:
            ConfigError: The file is wrong.
        """
        fixed = self._config.prefill_address
        if not self._config.prefill_peers_file:
            self._peers.configure(fixed)
            return
        metrics = self._parts.metrics
        peers_file = PeersFile(
            Path(self._config.prefill_peers_file),
            on_addresses=lambda more: self._peers.configure(tuple(dict.fromkeys(fixed + more))),
            on_invalid=lambda is_invalid: metrics.peers_file_invalid.set(float(is_invalid)),
        )
        await peers_file.start()
        self._peers_file_task = asyncio.create_task(peers_file.run())
        self._peers_file_task.add_done_callback(_report_end)

    def _bind(self) -> BoundServer:
        bound = build_server(
            self._config,
            interceptors=[ErrorInterceptor(self._parts.metrics)],
            service_health=self._health,
            service_names=[_SERVICE_NAME],
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._make_servicer(), bound.server)
        return bound

    def _make_coordinator(self, max_open: int) -> RequestCoordinator:
        config, memory, metrics = self._config, self._memory, self._parts.metrics
        tools = HandoffTools(
            table=memory.table,
            issuer=memory.issuer,
            blocks=self._blocks,
            revoker=self._revoker,
            executor=self._executor,
            metrics=metrics,
            layout=memory.layout,
            vocab_size=self._parts.served.model.config.vocab_size,
            lease_s=config.lease_s,
            renew_interval_s=config.renew_interval_s,
            write_timeout_s=_WRITE_TIMEOUT_S,
            silence_timeout_s=config.prefill_silence_s,
        )
        return RequestCoordinator(
            kv_source=KvReceiver(tools=tools, peers=self._peers, budget=RetryBudget()),
            compute=self._runner,
            limits=CoordinatorLimits(
                max_open=max_open,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                max_unread_tokens=config.max_unread_tokens,
            ),
            metrics=metrics,
            on_idle=self._check_integrity_soon,
            clock=time.monotonic,
        )

    def _make_servicer(self) -> DecodeServicer:
        config, served = self._config, self._parts.served
        reader = RequestReader(
            tokenizer=served.tokenizer,
            limits=self._limits,
            defaults=ReaderDefaults(
                eos_token_ids=served.model.config.eos_token_ids,
                max_tokens=config.default_max_tokens or None,
                timeout_s=config.default_request_timeout_s,
            ),
            executor=self._executor,
            clock=time.monotonic,
        )
        info = ServiceInfo(
            model=model_info(config, served),
            incarnation=self._memory.decode_incarnation,
            version=metadata.version("tandem-serve"),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            pool=self._memory.pool,
            coordinator=self._coordinator,
            clock=time.monotonic,
        )
        return DecodeServicer(
            reader=reader,
            coordinator=self._coordinator,
            info=info,
            tokenizer=served.tokenizer,
            unhealthy_because=self._unhealthy_because,
            clock=time.monotonic,
        )

    def _make_peer(self, address: str) -> PrefillPeer:
        metrics = self._parts.metrics

        def on_change(peer: PrefillPeer) -> None:
            metrics.peer_usable(peer.address, peer.state is PeerState.READY)
            self._peers.peer_changed()

        memory = self._memory
        return PrefillPeer(
            address=address,
            channel=open_channel(address, self._config),
            handshake=pb.HandshakeRequest(
                protocol_version=PROTOCOL_VERSION,
                decode_incarnation=memory.decode_incarnation,
                layout=wire.layout_to_proto(memory.layout),
                max_model_len=self._parts.served.max_model_len,
            ),
            landings=self._landings,
            layout=memory.layout,
            probe_timeout_s=self._config.prefill_silence_s,
            on_change=on_change,
            on_handshake=metrics.handshake_ended,
        )

    def _num_ending_tickets(self, address: str) -> int:
        """Count the tickets of a peer whose blocks its writers may still reach."""
        return sum(
            one.peer == address and one.state is not ReservationState.COMMITTED
            for one in self._memory.table.reservations()
        )

    def _limits(self) -> RequestLimits:
        return RequestLimits(
            vocab_size=self._parts.served.model.config.vocab_size,
            max_model_len=self._parts.served.max_model_len,
            max_sequence_tokens=self._config.num_kv_blocks * self._config.block_size,
            max_prompt_tokens=self._peers.max_prompt_tokens,
        )

    def _unhealthy_because(self) -> str:
        if not self._is_ready:
            return "starting or shutting down"
        return "" if self._peers.can_move_kv else "no prefill service can be used"

    def _on_results(self, results: Any) -> None:
        self._coordinator.on_results(results)

    def _on_step(self, stats: StepStats) -> None:
        self._parts.metrics.step_seconds.observe(stats.duration_s)

    def _on_fatal(self, error: BaseException) -> None:
        """A dead compute thread ends the process: nobody can say what its memory holds."""
        logger.critical("the compute thread has ended", exc_info=error)
        self._fatal = error
        self._set_ready(False)
        self._coordinator.fail_all("the compute thread has ended")
        self._ended.set()

    def _set_ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._health_changed.set()

    async def _report_health(self) -> None:
        while True:
            self._health_changed.clear()
            await self._health.set(READY, self._is_ready)
            await self._health.set(KV, self._is_ready and self._peers.can_move_kv)
            await self._health_changed.wait()

    def _check_integrity_soon(self) -> None:
        """Look for lost blocks once the service has been idle for a moment."""
        loop = asyncio.get_running_loop()
        loop.call_later(_INTEGRITY_CHECK_DELAY_S, self._check_integrity_if_idle)

    def _check_integrity_if_idle(self) -> None:
        pool = self._memory.pool
        if self._coordinator.num_open == 0 and len(self._revoker) == 0:
            pool.check_integrity()
            if pool.num_free + pool.num_evictable != pool.num_total:
                logger.error("idle, and %d blocks are missing", pool.num_total - pool.num_free)


def _report_end(task: "asyncio.Task[None]") -> None:
    """A task that goes on until it is cancelled ends by a mistake of ours only."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the file of prefill services is not followed any more", exc_info=error)
