"""One prefill and one decode process over real sockets, and what tests ask of them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tandem import Client
from tests.support.processes import (
    ServiceProcess,
    prefill_pool_is_whole,
    running,
    wait_until,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """Settings of one pair; the modules may be fault-injecting entry points."""

    model_dir: Path
    block_size: int = 16
    chunk_tokens: int = 512
    num_kv_blocks: int = 512
    max_num_seqs: int = 8
    engine: str = "shm"
    prefill_module: str = "prefill_service"
    decode_module: str = "decode_service"
    prefill_first_args: Sequence[str] = ()
    decode_first_args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    prefill_env: dict[str, str] = field(default_factory=dict)
    decode_env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Pair:
    """A running pair."""

    settings: PairSettings
    prefill: ServiceProcess
    decode: ServiceProcess

    def client(self) -> Client:
        """A client of the decode service; close it after use."""
        return Client(self.decode.address)

    def decode_loads(self) -> vllm_engine_pb2.SchedulerLoad:
        """The decode service's load report."""
        with grpc.insecure_channel(self.decode.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            reply = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=5)
        return reply.loads[0]

    def decode_pool_is_whole(self) -> bool:
        """Whether no token is held and no request is left on decode."""
        load = self.decode_loads()
        return load.num_used_tokens == 0 and load.num_total_reqs == 0

    def pools_are_whole(self) -> bool:
        """Whether both pools are whole and both services idle."""
        return self.decode_pool_is_whole() and prefill_pool_is_whole(self.prefill.address)

    def wait_pools_whole(self, timeout_s: float) -> float:
        """Waits for `pools_are_whole` and returns the seconds it took."""
        return wait_until(self.pools_are_whole, timeout_s=timeout_s, what="both pools whole")

    def restart_prefill(self) -> None:
        """Starts prefill again on the port it had."""
        self.prefill.kill()
        port = self.prefill.port
        self.prefill.args = [
            f"--port={port}" if arg.startswith("--port=") else arg for arg in self.prefill.args
        ]
        self.prefill.start()

    def wait_kv_ready(self, timeout_s: float = 10.0) -> None:
        """Waits until decode can move KV from at least one prefill service."""
        wait_until(self.kv_is_ready, timeout_s=timeout_s, what="decode can move KV")

    def kv_is_ready(self) -> bool:
        """Whether decode reports the health service `tandem.kv` as serving."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(self.decode.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service="tandem.kv"), timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def running_pair(settings: PairSettings, log_dir: Path) -> Iterator[Pair]:
    """Starts a pair, waits until it can serve, and stops it in the end."""
    with tempfile.TemporaryDirectory(prefix="tandem-kv-") as socket_dir:
        shared = [
            f"--model={settings.model_dir}",
            "--port=0",
            f"--block-size={settings.block_size}",
            f"--num-kv-blocks={settings.num_kv_blocks}",
            f"--max-num-seqs={settings.max_num_seqs}",
            f"--kv-engine={settings.engine}",
            f"--kv-socket-dir={socket_dir}",
        ]
        prefill = ServiceProcess(
            module=settings.prefill_module,
            args=[
                *settings.prefill_first_args,
                *shared,
                f"--max-num-batched-tokens={settings.chunk_tokens}",
                *settings.prefill_args,
            ],
            log_path=log_dir / "prefill.log",
            env=settings.prefill_env,
        )
        with running([prefill]):
            decode = ServiceProcess(
                module=settings.decode_module,
                args=[
                    *settings.decode_first_args,
                    *shared,
                    f"--prefill-address={prefill.address}",
                    *settings.decode_args,
                ],
                log_path=log_dir / "decode.log",
                env=settings.decode_env,
            )
            with running([decode]):
                pair = Pair(settings=settings, prefill=prefill, decode=decode)
                pair.wait_kv_ready()
                yield pair
