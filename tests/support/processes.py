"""Real service processes for end-to-end and fault tests: start, wait until ready, kill, restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import grpc

from tandem.v1 import prefill_service_pb2, prefill_service_pb2_grpc

READY_TIMEOUT_S = 40.0
POLL_S = 0.01


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Polls `condition` until it holds; returns the seconds it took.

    Raises:
        AssertionError: the condition did not hold within `timeout_s`.
    """
    started = monotonic()
    pause = threading.Event()
    while not condition():
        waited = monotonic() - started
        assert waited < timeout_s, f"{what}: not within {timeout_s} s"
        pause.wait(POLL_S)
    return monotonic() - started


@dataclass(kw_only=True)
class ServiceProcess:
    """One service process; `start` returns when it printed its ready line."""

    module: str
    args: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    address: str = ""

    def start(self) -> None:
        """Starts the process and waits for its ready line."""
        log = self.log_path.open("a")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.env}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, *self.args],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        log.close()
        self.address = self._read_ready_line()

    def _read_ready_line(self) -> str:
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        timer = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            for line in stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    message = json.loads(line)
                    if message.get("event") == "ready":
                        return str(message["address"])
        finally:
            timer.cancel()
        raise AssertionError(f"{self.module} did not get ready:\n{self.log_tail()}")

    @property
    def pid(self) -> int:
        """The running process's id."""
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        """The port in the ready line."""
        return int(self.address.rsplit(":", 1)[1])

    def is_running(self) -> bool:
        """Whether the process has not exited."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._close_stdout()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def signal_if_running(self, number: signal.Signals) -> None:
        """Sends a signal to a process that may have ended, or never begun."""
        if self.is_running():
            self.signal(number)

    def wait_exit(self, timeout_s: float) -> int:
        """Waits for the exit and returns its code."""
        assert self._process is not None
        code = self._process.wait(timeout=timeout_s)
        self._close_stdout()
        return code

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 15 s."""
        if self._process is None or self._process.poll() is not None:
            self._close_stdout()
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._close_stdout()

    def _close_stdout(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the process's stderr."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text().splitlines()[-lines:])


def prefill_status(address: str) -> prefill_service_pb2.GetPoolStatusResponse:
    """Block and job counts of the prefill service at `address`."""
    with grpc.insecure_channel(address) as channel:
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        return stub.GetPoolStatus(prefill_service_pb2.GetPoolStatusRequest(), timeout=5)


def prefill_pool_is_whole(address: str) -> bool:
    """Whether every block of prefill's pool is free or evictable and no job is left."""
    status = prefill_status(address)
    free = status.num_free_blocks + status.num_evictable_blocks
    return free == status.num_blocks and status.num_queued_jobs + status.num_active_jobs == 0


@contextlib.contextmanager
def running(processes: Sequence[ServiceProcess]) -> Iterator[None]:
    """Starts the processes in order, and stops all of them in the end."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in reversed(processes):
            process.stop()
