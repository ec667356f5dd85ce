"""The public router `smg` in front of the decode services: it gives the OpenAI HTTP API.

It runs as a child process of the launcher. It has no ready line; it is ready when its own readiness
endpoint says so and it has fetched the model's tokenizer from a decode service.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from time import monotonic

MODULE = "smg.launch_router"
HOST = "127.0.0.1"

_CHECK_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 2.0
# A first token may take as long as a long prompt needs; the router's own 3 s would cut it off.
_SILENCE_S = 600
_GRACE_S = 5
# Health is asked every second (60 s by default), so that a service that returns is used within one
# or two. Three failures in a row, each after 3 s at most, take it out: a busy machine may miss one.
_HEALTH_INTERVAL_S = 1
_HEALTH_TIMEOUT_S = 3
_HEALTH_FAILURES = 3
_HEALTH_SUCCESSES = 1
# The policy goes by the loads that it polls. At every 10 s, the default, a service that returned
# was judged by what it had reported before its end, and got nothing for up to 7 s.
_LOAD_INTERVAL_S = 1
# Ten failures open the circuit breaker before the health checks have noticed. It must not outlast
# them: after its own 60 s, a service that returned within seconds would idle for the rest of them.
_BREAKER_OPEN_S = 2
_BREAKER_SUCCESSES = 1
# Attempts in all. A request without a token goes to another decode service once; more attempts
# would feed an overload, and decode itself tries another prefill service first.
_ATTEMPTS = 2


def free_port() -> int:
    """A TCP port of the loopback address that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nobody listens on a TCP port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a server would bind: connections that are still being closed are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def arguments(*, port: int, metrics_port: int, decode_addresses: Sequence[str]) -> list[str]:
    """The router's command line.

    Args:
        port: Port of the HTTP API.
        metrics_port: Port of its Prometheus endpoint; both are on the loopback address.
        decode_addresses: host:port of the decode services.
    """
    return [
        f"--host={HOST}",
        f"--port={port}",
        f"--prometheus-host={HOST}",
        f"--prometheus-port={metrics_port}",
        "--worker-urls",
        *(f"grpc://{address}" for address in decode_addresses),
        "--policy=least_load",
        f"--load-monitor-interval={_LOAD_INTERVAL_S}",
        "--worker-startup-check-interval=1",
        f"--worker-wedge-secs={_SILENCE_S}",
        f"--retry-max-retries={_ATTEMPTS}",
        f"--health-check-interval-secs={_HEALTH_INTERVAL_S}",
        f"--health-check-timeout-secs={_HEALTH_TIMEOUT_S}",
        f"--health-failure-threshold={_HEALTH_FAILURES}",
        f"--health-success-threshold={_HEALTH_SUCCESSES}",
        f"--cb-timeout-duration-secs={_BREAKER_OPEN_S}",
        f"--cb-success-threshold={_BREAKER_SUCCESSES}",
        f"--shutdown-grace-period-secs={_GRACE_S}",
        "--log-level=warn",
    ]


def is_routing(address: str, *, num_decode: int) -> bool:
    """Whether the router at host:port takes requests for so many decode services.

    It counts itself ready with one of them, and before it has a tokenizer.
    """
    readiness = _get(address, "/readiness")
    if readiness is None or json.loads(readiness)["healthy_workers"] < num_decode:
        return False
    tokenizers = _get(address, "/v1/tokenizers")
    return bool(tokenizers and json.loads(tokenizers).get("tokenizers"))


def wait_until_routing(
    address: str, *, num_decode: int, deadline: float, check: Callable[[], object]
) -> None:
    """Waits until the router takes requests for every decode service.

    Args:
        address: host:port of the router.
        num_decode: How many decode services it was told of.
        deadline: Monotonic time at which to give up.
        check: Called between attempts; may raise to end the wait.

    Raises:
        TimeoutError: It did not in time.
    """
    pause = threading.Event()
    while not is_routing(address, num_decode=num_decode):
        check()
        if monotonic() >= deadline:
            raise TimeoutError(f"the router at {address} takes no requests")
        pause.wait(_CHECK_INTERVAL_S)


def _get(address: str, path: str) -> bytes | None:
    """The body of a 200 answer; None for any other, or when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=_CALL_TIMEOUT_S) as reply:
            return bytes(reply.read()) if reply.status == HTTPStatus.OK else None
    except (OSError, urllib.error.URLError):
        return None
