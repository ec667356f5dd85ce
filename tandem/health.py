"""Waits for a signal of the standard gRPC health service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_CHECK_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 2.0


def is_serving(channel: grpc.Channel, signal: str) -> bool:
    """Whether the service at the other end says that it serves `signal` now."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=signal)
    try:
        reply = stub.Check(request, timeout=_CALL_TIMEOUT_S)
    except grpc.RpcError:
        return False  # Not there, not yet, or no such signal: it does not serve.
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def wait_until_serving(
    address: str, signal: str, *, deadline: float, check: Callable[[], object]
) -> None:
    """Waits until `signal` is served.

    Args:
        address: host:port of the service.
        signal: Name of the health service, e.g. "tandem.kv".
        deadline: Monotonic time at which to give up.
        check: Called between attempts; may raise to end the wait.

    Raises:
        TimeoutError: It was not served in time.
    """
    pause = threading.Event()
    with grpc.insecure_channel(address) as channel:
        while not is_serving(channel, signal):
            check()
            if monotonic() >= deadline:
                raise TimeoutError(f"{address} does not serve {signal}")
            pause.wait(_CHECK_INTERVAL_S)
