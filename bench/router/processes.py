"""Starts the service and the router for a measurement, and ends them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from bench.report import ROOT
from bench.router.free_compute import Pace
from tandem.router import HOST, MODULE, arguments, free_port, wait_until_routing

_ROUTING_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0


class ServiceError(Exception):
    """A process ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds of the service since its start.

    Attributes:
        process_s: All threads.
        loop_s: The event loop's thread.
        compute_s: The thread that makes tokens in place of the model.
    """

    process_s: float
    loop_s: float
    compute_s: float


class Service:
    """A running `bench.router.service`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wait until it serves.

        Raises:
            ServiceError: It has ended instead.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        self._input: IO[str] = process.stdin
        self._output: IO[str] = process.stdout
        self.address: str = self._read()["address"]

    def set_pace(self, pace: Pace) -> None:
        """Change how tokens come."""
        self._ask({"pace": asdict(pace)})

    def cpu_times(self) -> CpuTimes:
        """Return what it has used."""
        return CpuTimes(**self._ask({"cpu": True}))

    def _ask(self, command: dict[str, object]) -> dict[str, float]:
        self._input.write(json.dumps(command) + "\n")
        self._input.flush()
        answer: dict[str, float] = self._read()
        return answer

    def _read(self) -> dict[str, Any]:
        line = self._output.readline()
        if not line:
            raise ServiceError("the service has ended")
        content: dict[str, Any] = json.loads(line)
        return content


@contextlib.contextmanager
def running_service(core: int | None) -> Iterator[Service]:
    """Run a service, pinned to a core if one is given."""
    command = [sys.executable, "-m", "bench.router.service"]
    with _running(command if core is None else [*command, str(core)]) as process:
        yield Service(process)


@contextlib.contextmanager
def running_router(service_address: str) -> Iterator[str]:
    """Run the router, on the cores of this thread, in front of a service; yields host:port."""
    port, metrics_port = free_port(), free_port()
    flags = arguments(port=port, metrics_port=metrics_port, decode_addresses=[service_address])
    with _running([sys.executable, "-m", MODULE, *flags]) as process:
        address = f"{HOST}:{port}"
        deadline_s = time.monotonic() + _ROUTING_TIMEOUT_S
        wait_until_routing(address, num_decode=1, deadline=deadline_s, check=_must_run(process))
        yield address


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_TIMEOUT_S)


def _must_run(process: subprocess.Popen[str]) -> Callable[[], None]:
    def check() -> None:
        if process.poll() is not None:
            raise ServiceError(f"the router has ended with status {process.returncode}")

    return check
