"""Builds a gRPC server: listen address, TLS, keepalive, health, reflection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving_core.config import ServiceConfig
from serving_core.errors import ConfigError

LIVE = ""
READY = "tandem.ready"
KV = "tandem.kv"
MAX_MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundServer:
    """A server that has its port but does not serve yet."""

    server: Any
    address: str


class ServiceHealth:
    """The three signals of `grpc.health.v1`, each true only when it is true.

    The service name "" says that the process lives, "tandem.ready" that it takes requests, and
    "tandem.kv" that it can move KV with at least one peer.
    """

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs

    def add_to(self, server: Any) -> None:
        """Register the health service."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, signal: str, is_serving: bool) -> None:
        """Change one signal; watchers are told."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._servicer.set(signal, status.SERVING if is_serving else status.NOT_SERVING)

    async def start(self) -> None:
        """Live, not ready yet."""
        await self.set(LIVE, True)
        await self.set(READY, False)
        await self.set(KV, False)

    async def stop(self) -> None:
        """Neither ready nor able to move KV; still live until the process ends."""
        await self.set(READY, False)
        await self.set(KV, False)


def build_server(
    config: ServiceConfig,
    *,
    interceptors: Sequence[Any],
    service_health: ServiceHealth,
    service_names: Sequence[str],
) -> BoundServer:
    """Make a server bound to the configured address.

    Args:
        config: Host, port, TLS files and the reflection switch.
        interceptors: Server interceptors, outermost first.
        service_health: Registered on the server.
        service_names: Full names of the services, for reflection.

    Raises:
        ConfigError: The address cannot be bound, or a TLS file cannot be read.
    """
    server = grpc.aio.server(interceptors=list(interceptors), options=_server_options())
    service_health.add_to(server)
    if config.grpc_reflection:
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    wanted = f"{host}:{config.port}"
    try:
        if config.tls_cert:
            port = server.add_secure_port(wanted, _server_credentials(config))
        else:
            port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise ConfigError([f"host and port = {wanted}: cannot listen there ({error})"]) from error
    if port == 0:
        raise ConfigError([f"host and port = {wanted}: cannot listen there"])
    return BoundServer(server=server, address=f"{host}:{port}")


def _server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Decode pings every second to notice a stopped prefill within 4 s.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 5000),
        ("grpc.keepalive_timeout_ms", 5000),
        # Two services must never share a port in silence.
        ("grpc.so_reuseport", 0),
    ]


def _server_credentials(config: ServiceConfig) -> grpc.ServerCredentials:
    chain = read_pem("tls-cert", config.tls_cert)
    private_key = read_pem("tls-key", config.tls_key)
    authorities = read_pem("tls-ca", config.tls_ca) if config.tls_ca else None
    return grpc.ssl_server_credentials(
        [(private_key, chain)],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def read_pem(name: str, path: str) -> bytes:
    """Read a PEM file.

    Raises:
        ConfigError: Names the key and the path.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError([f"{name} = {path}: {error.strerror}"]) from error
