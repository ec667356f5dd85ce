"""Starts prefill and decode services on this machine, waits until they serve, stops all of them.

    new -> starting -> ready -> stopped
             |           |
             +-----------+--> failed: a child died; everything else is stopped

Prefill services start first, on free ports; decode services get their addresses, and the router
gets those of the decode services. All services share one private directory of sockets, removed in
the end. A child's death, a signal and a caller's stop
arrive through one queue, so that there is one place that waits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Self

from tandem import router
from tandem.child_process import (
    ChildExited,
    ChildProcess,
    ChildReady,
    LauncherEvent,
    StopRequested,
)
from tandem.health import wait_until_serving

KV_SIGNAL = "tandem.kv"
ROUTER_NAME = "router"


class LauncherError(Exception):
    """A service died or did not get ready; the message names it and ends with its last lines."""


class LauncherStoppedError(Exception):
    """Somebody asked to stop while the services were starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What to start.

    Attributes:
        model_dir: Checkpoint that all services load.
        num_prefill: Prefill services.
        num_decode: Decode services.
        decode_port: Port of the first decode service, the next ones count up; 0 takes free ones.
        router: Whether to start the router, which serves the OpenAI HTTP API.
        router_port: Port of that API; 0 takes a free one.
        kv_engine: How KV moves.
        num_threads: Threads of each service; 0 divides the cores among them.
        service_arguments: Flags for all services, e.g. ("--block-size=16",).
        prefill_arguments: Flags for prefill services only.
        decode_arguments: Flags for decode services only.
        drain_grace_s: How long running requests may go on after a stop.
        kill_after_s: How long a service may take to end after that grace, before it is killed.
        ready_timeout_s: Longest wait until everything serves.
        log_dir: Directory for one log file per service; None keeps only their last lines.
        prefill_module: Module of the prefill service.
        decode_module: Module of the decode service.
    """

    model_dir: Path
    num_prefill: int = 1
    num_decode: int = 1
    decode_port: int = 0
    router: bool = False
    router_port: int = 0
    kv_engine: str = "shm"
    num_threads: int = 0
    service_arguments: tuple[str, ...] = ()
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    drain_grace_s: float = 5.0
    kill_after_s: float = 5.0
    ready_timeout_s: float = 120.0
    log_dir: Path | None = None
    prefill_module: str = "prefill_service"
    decode_module: str = "decode_service"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServices:
    """Addresses (host:port) of what serves; `router` is empty when there is none."""

    decode: tuple[str, ...]
    prefill: tuple[str, ...]
    router: str = ""


class Launcher:
    """Runs the services; a context manager that leaves no process behind.

    Use it from one thread that lives as long as the services, except for `request_stop`.

    Args:
        settings: What to start.
        on_log_line: Called with (service, line) for each log line, from other threads.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        on_log_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_log_line = on_log_line
        self._events: SimpleQueue[LauncherEvent] = SimpleQueue()
        self._children: dict[str, ChildProcess] = {}
        self._socket_dir = tempfile.TemporaryDirectory(prefix="tandem-kv-")  # Mode 0700.

    def start(self) -> RunningServices:
        """Starts everything and waits until each decode service can move KV.

        Raises:
            LauncherError: A service died, or the time ran out.
            LauncherStoppedError: `request_stop` was called.
        """
        settings = self._settings
        deadline = monotonic() + settings.ready_timeout_s
        prefill = self._start_group(
            "prefill", settings.prefill_module, self._prefill_arguments(), deadline
        )
        decode = self._start_group(
            "decode", settings.decode_module, self._decode_arguments(prefill), deadline
        )
        for index, address in enumerate(decode):
            self._wait_until_kv_moves(f"decode-{index}", address, deadline)
        router_address = self._start_router(decode, deadline) if settings.router else ""
        return RunningServices(decode=decode, prefill=prefill, router=router_address)

    def wait(self) -> str:
        """Waits until `request_stop`; returns its cause.

        Raises:
            LauncherError: A service ended by itself.
        """
        try:
            while True:
                self._poll(block_s=None)
        except LauncherStoppedError as stopped:
            return str(stopped)

    def request_stop(self, cause: str) -> None:
        """Makes `start` or `wait` end. Safe from a signal handler and from any thread."""
        self._events.put(StopRequested(cause=cause))

    def pids(self) -> dict[str, int]:
        """Process id of each service by name."""
        return {name: child.pid for name, child in self._children.items()}

    def stop(self) -> None:
        """Ends all services, the clients' side first, and removes the sockets."""
        try:
            for role in (ROUTER_NAME, "decode", "prefill"):
                self._stop_group([c for c in self._children.values() if c.name.startswith(role)])
        finally:
            self._children.clear()
            self._socket_dir.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _stop_group(self, children: Sequence[ChildProcess]) -> None:
        try:
            for child in children:
                child.terminate()
            deadline = monotonic() + self._settings.drain_grace_s + self._settings.kill_after_s
            for child in children:
                child.wait(max(0.0, deadline - monotonic()))
        finally:
            for child in children:
                child.kill()
                child.close()

    def _common_arguments(self) -> list[str]:
        settings = self._settings
        return [
            f"--model={settings.model_dir}",
            f"--kv-engine={settings.kv_engine}",
            f"--kv-socket-dir={self._socket_dir.name}",
            f"--num-threads={self._threads_per_service()}",
            f"--drain-grace-s={settings.drain_grace_s}",
            *settings.service_arguments,
        ]

    def _threads_per_service(self) -> int:
        """As many as asked for, or an equal share of the cores that this process may use."""
        if self._settings.num_threads > 0:
            return self._settings.num_threads
        num_services = self._settings.num_prefill + self._settings.num_decode
        return max(1, len(os.sched_getaffinity(0)) // num_services)

    def _prefill_arguments(self) -> list[list[str]]:
        arguments = [*self._common_arguments(), *self._settings.prefill_arguments, "--port=0"]
        return [arguments] * self._settings.num_prefill

    def _decode_arguments(self, prefill_addresses: Sequence[str]) -> list[list[str]]:
        settings = self._settings
        shared = [
            *self._common_arguments(),
            *(f"--prefill-address={address}" for address in prefill_addresses),
            *settings.decode_arguments,
        ]
        first = settings.decode_port
        ports = [first + index if first else 0 for index in range(settings.num_decode)]
        return [[*shared, f"--port={port}"] for port in ports]

    def _start_group(
        self, role: str, module: str, arguments: Sequence[Sequence[str]], deadline: float
    ) -> tuple[str, ...]:
        """Starts services of one role and returns their addresses in order."""
        names = [f"{role}-{index}" for index in range(len(arguments))]
        for name, each in zip(names, arguments, strict=True):
            self._start_child(name, module, each)
        addresses: dict[str, str] = {}
        while len(addresses) < len(names):
            ready = self._poll(block_s=max(0.0, deadline - monotonic()))
            if ready is not None:
                addresses[ready.name] = ready.address
            elif monotonic() >= deadline:
                raise self._not_ready(next(name for name in names if name not in addresses))
        return tuple(addresses[name] for name in names)

    def _start_child(self, name: str, module: str, arguments: Sequence[str]) -> None:
        log_dir = self._settings.log_dir
        self._children[name] = ChildProcess(
            name=name,
            module=module,
            arguments=arguments,
            # The pools of torch and of the maths libraries follow the same number.
            environ={"OMP_NUM_THREADS": str(self._threads_per_service())},
            events=self._events,
            log_path=None if log_dir is None else log_dir / f"{name}.log",
            on_log_line=self._on_log_line,
        )

    def _start_router(self, decode_addresses: Sequence[str], deadline: float) -> str:
        """Starts the router and returns its address once it takes requests."""
        port = self._settings.router_port or router.free_port()
        address = f"{router.HOST}:{port}"
        # Another router on that port would answer in the place of ours.
        if not router.is_free(port):
            raise LauncherError(f"the router's port {port} is in use")
        arguments = router.arguments(
            port=port, metrics_port=router.free_port(), decode_addresses=decode_addresses
        )
        self._start_child(ROUTER_NAME, router.MODULE, arguments)
        try:
            router.wait_until_routing(
                address,
                num_decode=len(decode_addresses),
                deadline=deadline,
                check=lambda: self._poll(block_s=0),
            )
        except TimeoutError as error:
            raise self._not_ready(ROUTER_NAME) from error
        return address

    def _wait_until_kv_moves(self, name: str, address: str, deadline: float) -> None:
        try:
            wait_until_serving(
                address, KV_SIGNAL, deadline=deadline, check=lambda: self._poll(block_s=0)
            )
        except TimeoutError as error:
            raise self._not_ready(name) from error

    def _poll(self, *, block_s: float | None) -> ChildReady | None:
        """Takes one event; None when none came within `block_s` seconds (None waits for ever)."""
        try:
            event = self._events.get(block=block_s != 0, timeout=block_s)
        except Empty:
            return None
        match event:
            case ChildReady():
                return event
            case ChildExited():
                raise self._died(event)
            case StopRequested():
                raise LauncherStoppedError(event.cause)

    def _died(self, event: ChildExited) -> LauncherError:
        code = event.returncode
        how = f"with exit status {code}" if code >= 0 else f"by signal {-code}"
        return self._error(event.name, f"{event.name} ended {how}")

    def _not_ready(self, name: str) -> LauncherError:
        timeout_s = self._settings.ready_timeout_s
        return self._error(name, f"{name} was not ready within {timeout_s:g} s")

    def _error(self, name: str, message: str) -> LauncherError:
        tail = "\n".join(f"  {line}" for line in self._children[name].log_tail())
        return LauncherError(f"{message}; its last log lines:\n{tail or '  (none)'}")
