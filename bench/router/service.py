"""A decode service without model and prefill: `python -m bench.router.service [CORE]`.

Prints one JSON line with its address, then answers each JSON line of its input:

    {"pace": {"tokens_per_step": n, "step_s": x}}  ->  {}
    {"cpu": true}  ->  {"process_s": x, "loop_s": x, "compute_s": x}

It ends with its input. Servicer, request reader, coordinator, mailbox, streams, gRPC server and
interceptor are those of the decode service.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from bench.cpu import pin, process_cpu_s
from bench.router.free_compute import FreeCompute, FreeKv, Pace
from decode_service.coordinator import CoordinatorLimits, RequestCoordinator
from decode_service.loop_mailbox import LoopMailbox
from decode_service.request_parsing import RequestLimits
from decode_service.request_reader import ReaderDefaults, RequestReader
from decode_service.runner import StepResult
from decode_service.served_model import load_served_model, model_info
from decode_service.service_info import ServiceInfo
from decode_service.servicer import DecodeServicer
from serving_core.block_pool import BlockPool
from serving_core.config import DecodeConfig, Role, load_config
from serving_core.rpc.interceptors import ErrorInterceptor
from serving_core.rpc.server import KV, READY, ServiceHealth, build_server
from serving_core.telemetry import DecodeMetrics, set_up_logging
from tandem.default_model import default_model_dir

_SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_VERSION = "bench"


class FreeDecode:
    """The service; for one event loop."""

    def __init__(self, config: DecodeConfig) -> None:
        """Build everything but the server."""
        self._config = config
        self._served = load_served_model(config, None)
        self._metrics = DecodeMetrics(config.served_model_name)
        [token_id] = self._served.tokenizer.encode("stone")[-1:]
        mailbox: LoopMailbox[StepResult] = LoopMailbox(asyncio.get_running_loop(), self._on_results)
        self.compute = FreeCompute(token_id, mailbox.post)
        self._coordinator = RequestCoordinator(
            kv_source=FreeKv(token_id),
            compute=self.compute,
            limits=CoordinatorLimits(
                max_open=config.max_num_seqs + config.max_queued_requests,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                max_unread_tokens=config.max_unread_tokens,
            ),
            metrics=self._metrics,
            on_idle=lambda: None,
            clock=time.monotonic,
        )

    async def start(self) -> str:
        """Serve; returns host:port."""
        health = ServiceHealth()
        bound = build_server(
            self._config,
            interceptors=[ErrorInterceptor(self._metrics)],
            service_health=health,
            service_names=[_SERVICE_NAME],
        )
        self._server = bound.server  # lives as long as it is held
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer(), bound.server)
        await health.start()
        await bound.server.start()
        await health.set(READY, True)
        await health.set(KV, True)
        return bound.address

    def _servicer(self) -> DecodeServicer:
        config, served = self._config, self._served
        limits = RequestLimits(
            vocab_size=served.model.config.vocab_size,
            max_model_len=served.max_model_len,
            max_sequence_tokens=served.max_model_len,
            max_prompt_tokens=served.max_model_len,
        )
        reader = RequestReader(
            tokenizer=served.tokenizer,
            limits=lambda: limits,
            defaults=ReaderDefaults(
                eos_token_ids=served.model.config.eos_token_ids,
                max_tokens=config.default_max_tokens or None,
                timeout_s=config.default_request_timeout_s,
            ),
            executor=ThreadPoolExecutor(2),
            clock=time.monotonic,
        )
        info = ServiceInfo(
            model=model_info(config, served),
            incarnation=_VERSION,
            version=_VERSION,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            pool=BlockPool(config.num_kv_blocks),
            coordinator=self._coordinator,
            clock=time.monotonic,
        )
        return DecodeServicer(
            reader=reader,
            coordinator=self._coordinator,
            info=info,
            tokenizer=served.tokenizer,
            unhealthy_because=lambda: "",
            clock=time.monotonic,
        )

    def _on_results(self, results: Sequence[StepResult]) -> None:
        self._coordinator.on_results(results)


async def serve() -> None:
    """Serve until the input ends."""
    config = load_config(
        Role.DECODE,
        None,
        {"model": str(default_model_dir()), "prefill_address": ["127.0.0.1:1"], "port": 0},
        {},
    )
    assert isinstance(config, DecodeConfig)
    set_up_logging(config.log_level)
    service = FreeDecode(config)
    address = await service.start()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop_thread = threading.get_ident()

    def obey() -> None:
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line), service.compute, loop_thread)), flush=True)
        loop.call_soon_threadsafe(ended.set)

    print(json.dumps({"address": address}), flush=True)
    threading.Thread(target=obey, name="commands", daemon=True).start()
    await ended.wait()


def _answer(command: dict[str, Any], compute: FreeCompute, loop_thread: int) -> dict[str, float]:
    if "pace" in command:
        compute.set_pace(Pace(**command["pace"]))
        return {}
    return {
        "process_s": process_cpu_s(os.getpid()),
        "loop_s": time.clock_gettime(time.pthread_getcpuclockid(loop_thread)),
        "compute_s": compute.cpu_s(),
    }


def main() -> None:
    """Entry point."""
    if len(sys.argv) > 1:
        pin(int(sys.argv[1]))
    asyncio.run(serve())
    os._exit(0)  # calls that are still open are of no interest


if __name__ == "__main__":
    main()
