"""Prefill services, decode services and the router, each a process that can die and return alone.

Every service keeps its port for the life of the cluster, so that a restarted one is found again by
those that knew it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tandem import router
from tests.support.processes import ServiceProcess, prefill_pool_is_whole, wait_until

# Below the ports that the kernel gives to outgoing connections: while a service is down, nobody
# takes its port by accident, and a connection to it cannot meet itself.
_FIRST_PORT, _LAST_PORT = 18_000, 31_000
_ROUTER_READY_S = 30.0


class PortSource:
    """Ports that are free now, no two alike."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self) -> int:
        """A port for one service."""
        while True:
            port = random.randrange(_FIRST_PORT, _LAST_PORT)
            if port not in self._taken and router.is_free(port):
                self._taken.add(port)
                return port


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of one cluster; `prefill_module` may be a fault-injecting entry point."""

    model_dir: Path
    num_prefill: int = 2
    num_decode: int = 2
    block_size: int = 16
    chunk_tokens: int = 128
    num_kv_blocks: int = 1024
    max_num_seqs: int = 16
    engine: str = "shm"
    prefill_module: str = "prefill_service"
    prefill_args: Sequence[str] = ()
    prefill_env: dict[str, str] = field(default_factory=dict)
    decode_args: Sequence[str] = ()


@dataclass(kw_only=True)
class RouterProcess:
    """The router as `tandem up` starts it, on a port that it keeps."""

    port: int
    metrics_port: int
    decode_addresses: Sequence[str]
    log_path: Path
    _process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port of its HTTP API."""
        return f"{router.HOST}:{self.port}"

    def launch(self) -> None:
        """Starts the process, and does not wait until it routes."""
        arguments = router.arguments(
            port=self.port,
            metrics_port=self.metrics_port,
            decode_addresses=self.decode_addresses,
        )
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", router.MODULE, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_routing(self) -> float:
        """Waits until it takes requests and knows every decode service; returns the seconds."""
        return wait_until(
            lambda: router.is_routing(self.address, num_decode=len(self.decode_addresses)),
            timeout_s=_ROUTER_READY_S,
            what="the router routes to every decode service",
        )

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()


@dataclass(kw_only=True)
class Cluster:
    """A running cluster."""

    settings: ClusterSettings
    prefill: list[ServiceProcess]
    decode: list[ServiceProcess]
    router: RouterProcess

    @property
    def services(self) -> list[ServiceProcess]:
        """All but the router."""
        return [*self.prefill, *self.decode]

    def pools_are_whole(self) -> bool:
        """Whether every pool is whole and every service idle."""
        return all(decode_pool_is_whole(one.address) for one in self.decode) and all(
            prefill_pool_is_whole(one.address) for one in self.prefill
        )

    def wait_pools_whole(self, timeout_s: float) -> float:
        """Waits for `pools_are_whole` and returns the seconds it took."""
        return wait_until(self.pools_are_whole, timeout_s=timeout_s, what="every pool is whole")

    def errors_in_logs(self) -> list[str]:
        """Lines in which a service says that something is wrong with itself."""
        lines = [line for one in self.services for line in one.log_path.read_text().splitlines()]
        return [line for line in lines if " ERROR " in line or " CRITICAL " in line]


def decode_load(address: str) -> vllm_engine_pb2.SchedulerLoad:
    """The load report of the decode service at `address`."""
    with grpc.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        return stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=5).loads[0]


def decode_pool_is_whole(address: str) -> bool:
    """Whether no token is held and no request is left on decode."""
    load = decode_load(address)
    return load.num_used_tokens == 0 and load.num_total_reqs == 0


@contextlib.contextmanager
def running_cluster(settings: ClusterSettings, log_dir: Path) -> Iterator[Cluster]:
    """Starts a cluster, waits until every decode service is routed to, and stops it in the end."""
    ports = PortSource()
    with tempfile.TemporaryDirectory(prefix="tandem-kv-") as socket_dir:
        shared = [
            f"--model={settings.model_dir}",
            f"--block-size={settings.block_size}",
            f"--num-kv-blocks={settings.num_kv_blocks}",
            f"--max-num-seqs={settings.max_num_seqs}",
            f"--kv-engine={settings.engine}",
            f"--kv-socket-dir={socket_dir}",
        ]
        prefill = [
            _prefill(settings, [*shared, f"--port={ports.take()}"], log_dir / f"prefill-{i}.log")
            for i in range(settings.num_prefill)
        ]
        shared += [f"--prefill-address={_address(one)}" for one in prefill]
        decode = [
            _decode(settings, [*shared, f"--port={ports.take()}"], log_dir / f"decode-{i}.log")
            for i in range(settings.num_decode)
        ]
        front = RouterProcess(
            port=ports.take(),
            metrics_port=ports.take(),
            decode_addresses=[_address(one) for one in decode],
            log_path=log_dir / "router.log",
        )
        cluster = Cluster(settings=settings, prefill=prefill, decode=decode, router=front)
        try:
            _start(cluster)
            yield cluster
        finally:
            front.stop()
            for one in decode + prefill:
                one.signal_if_running(signal.SIGTERM)
            for one in decode + prefill:
                one.stop()


def _prefill(settings: ClusterSettings, arguments: Sequence[str], log_path: Path) -> ServiceProcess:
    return ServiceProcess(
        module=settings.prefill_module,
        args=[
            *arguments,
            f"--max-num-batched-tokens={settings.chunk_tokens}",
            *settings.prefill_args,
        ],
        log_path=log_path,
        env=settings.prefill_env,
    )


def _decode(settings: ClusterSettings, arguments: Sequence[str], log_path: Path) -> ServiceProcess:
    return ServiceProcess(
        module="decode_service", args=[*arguments, *settings.decode_args], log_path=log_path
    )


def _address(service: ServiceProcess) -> str:
    """Where it will serve; known before it starts."""
    [port] = [arg.removeprefix("--port=") for arg in service.args if arg.startswith("--port=")]
    return f"{router.HOST}:{port}"


def _start(cluster: Cluster) -> None:
    """Starts the services side by side: each spends seconds on its imports."""
    with ThreadPoolExecutor(len(cluster.services)) as threads:
        list(threads.map(ServiceProcess.start, cluster.services))
    cluster.router.launch()
    cluster.router.wait_routing()
