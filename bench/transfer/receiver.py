"""The receiving process: `python -m bench.transfer.receiver CONTROL_FD MEMORY_FD`.

Reads an order (JSON) from the control socket, makes a pool for each method, reports (JSON) how they
are reached, and serves pushes until the sender is gone.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.cpu import pin, process_cpu_s
from bench.transfer.control import Control
from bench.transfer.landing import (
    CpuClock,
    Landing,
    OneSidedLanding,
    Pool,
    SocketLanding,
    StagedLanding,
    VerifiedLanding,
    serve,
)
from bench.transfer.methods import (
    HOST,
    MAX_ORDER_BYTES,
    Method,
    descriptor_to_json,
    usable_methods,
)
from bench.transfer.naive import NaiveEngine
from bench.transfer.plan import NUM_SLOTS, POOL_BYTES, SLOT_BYTES
from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings
from kv_transfer.engine.shm import ShmEngine


class Receiver:
    """Landings of all methods, and what the sender must know to reach them."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        """Start without any; what they hold is given back by `undo`."""
        self.landings: dict[Method, Landing] = {}
        self.report: dict[str, Any] = {}
        self._pids: dict[Method, list[int]] = {}
        self._undo = undo

    def add_memcpy(self, memory_fd: int) -> None:
        """Receive into memory that the sender made."""
        pool = Pool(mmap.mmap(memory_fd, POOL_BYTES))
        self._add(OneSidedLanding(pool), Method.MEMCPY)

    def add_shm(self, socket_dir: Path) -> None:
        """Receive into a target of the shm engine, with and without a digest."""
        target = ShmEngine(socket_dir).create_target(POOL_BYTES)
        self._undo.callback(target.close)
        self.report[Method.SHM] = descriptor_to_json(target.descriptor)
        pool = Pool(target.buffer)
        self._add(VerifiedLanding(pool), Method.SHM)
        self._add(OneSidedLanding(pool), Method.SHM_NO_DIGEST)

    def add_tcp(self, connection: socket.socket) -> None:
        """Receive from a connection."""
        self._add(SocketLanding(_private_pool(), connection), Method.TCP)

    def add_naive(self) -> None:
        """Receive with an engine of the bare package."""
        pool = _private_pool()
        engine = NaiveEngine(HOST)
        self._undo.callback(engine.close)
        engine.register(pool.address, pool.memory.nbytes)
        self.report[Method.MOONCAKE_NAIVE] = {"session": engine.session, "base": pool.address}
        self._add(OneSidedLanding(pool), Method.MOONCAKE_NAIVE)

    def add_mooncake(self) -> None:
        """Receive through a staging ring, with and without a digest."""
        ring = MooncakeEngine(MooncakeSettings(host=HOST)).create_target(NUM_SLOTS * SLOT_BYTES)
        self._undo.callback(ring.close)
        self.report[Method.MOONCAKE] = descriptor_to_json(ring.descriptor)
        pool = _private_pool()
        pids = [ring.receiver_pid]
        self._add(StagedLanding(pool, ring, verifies=True), Method.MOONCAKE, pids)
        self._add(StagedLanding(pool, ring, verifies=False), Method.MOONCAKE_NO_DIGEST, pids)

    def clock(self, method: Method) -> CpuClock:
        """Return the CPU time of this process and of those that a method started."""
        return cpu_clock([os.getpid(), *self._pids[method]])

    def _add(self, landing: Landing, method: Method, pids: Iterable[int] = ()) -> None:
        self.landings[method] = landing
        self._pids[method] = list(pids)


def cpu_clock(pids: Iterable[int]) -> CpuClock:
    """Return a clock of the CPU time of some processes, in ns."""
    those = list(pids)
    return lambda: sum(round(process_cpu_s(pid) * 1e9) for pid in those)


def _private_pool() -> Pool:
    return Pool(mmap.mmap(-1, POOL_BYTES))


def main() -> None:
    """Entry point."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    order = json.loads(connection.recv(MAX_ORDER_BYTES))
    if order["core"] is not None:
        pin(order["core"])
    methods = usable_methods()
    with contextlib.ExitStack() as undo:
        receiver = Receiver(undo)
        if Method.MOONCAKE in methods:
            # First: the bare package wants to know all listening sockets of its process as its own.
            receiver.add_naive()
            receiver.add_mooncake()
        receiver.add_memcpy(int(sys.argv[2]))
        receiver.add_shm(Path(order["socket_dir"]))
        with socket.create_server((HOST, 0)) as listener:
            receiver.report[Method.TCP] = listener.getsockname()[1]
            connection.send(json.dumps(receiver.report).encode())
            receiver.add_tcp(undo.enter_context(listener.accept()[0]))
        control = Control(connection)
        serve(
            [receiver.landings[one] for one in methods],
            control,
            [receiver.clock(one) for one in methods],
        )


if __name__ == "__main__":
    main()
