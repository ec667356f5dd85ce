"""Opens channels to other services."""

from __future__ import annotations

from typing import Any

import grpc

from serving_core.config import ServiceConfig
from serving_core.rpc.server import MAX_MESSAGE_BYTES, read_pem

# Together they bound the time until a stopped peer is noticed during a call: 3.5 s.
KEEPALIVE_TIME_MS = 1000
KEEPALIVE_TIMEOUT_MS = 2500


def open_channel(address: str, config: ServiceConfig) -> Any:
    """Open an asynchronous channel; it connects when first used.

    Args:
        address: host:port from the configuration, never from a client.
        config: TLS files; with none of them the channel is plaintext.

    Raises:
        ConfigError: A TLS file cannot be read.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Each service owns its connection: a peer's death must not be hidden by a shared one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if not (config.tls_ca or config.tls_cert):
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read_pem("tls-ca", config.tls_ca) if config.tls_ca else None,
        private_key=read_pem("tls-key", config.tls_key) if config.tls_key else None,
        certificate_chain=read_pem("tls-cert", config.tls_cert) if config.tls_cert else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=options)
