"""The sending process: makes the receiver, connects each method, and takes the samples."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import ROOT
from bench.transfer.control import TIMEOUT_S, Control, ControlError, Kind
from bench.transfer.landing import CpuClock
from bench.transfer.methods import (
    HOST,
    MAX_ORDER_BYTES,
    Method,
    NullDigest,
    descriptor_from_json,
    usable_methods,
)
from bench.transfer.naive import NaiveEngine
from bench.transfer.plan import MIB, POOL_BYTES, PushPlan
from bench.transfer.pushing import (
    LinkPush,
    MemcpyPush,
    NaivePush,
    Push,
    SocketPush,
    StagedPush,
)
from bench.transfer.receiver import cpu_clock
from kv_transfer.digest import digest_rows
from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings
from kv_transfer.engine.shm import ShmEngine
from kv_transfer.spans import ByteSpan

_INCARNATION = "bench-sender"
_CONNECT_TIMEOUT_S = 20.0
# A run of a small push is many pushes, else the clock and the scheduler would be measured.
_RUN_BYTES = 256 * MIB
_MAX_PUSHES_PER_RUN = 64


@dataclass(slots=True, kw_only=True)
class Samples:
    """What one method did for one plan.

    Attributes:
        push_s: For each run, the mean time of its pushes.
        pushed_bytes: Over all runs.
        sender_cpu_s: CPU time of the sending side, over all runs.
        receiver_cpu_s: Of the receiving side.
    """

    push_s: list[float] = field(default_factory=list)
    pushed_bytes: int = 0
    sender_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0


class Source:
    """The source pool, with random content."""

    def __init__(self) -> None:
        """Fill it."""
        mapping = mmap.mmap(-1, POOL_BYTES)
        mapping[:] = random.Random(0).randbytes(POOL_BYTES)
        self.memory = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def digest(self, plan: PushPlan) -> int:
        """Return the digest of the blocks of a plan, in its order."""
        spans = [ByteSpan(offset, plan.block_bytes) for offset in plan.source_offsets]
        return digest_rows(self.memory, spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """All methods, connected.

    Attributes:
        control: Connected to the receiver.
        pushes: By method, in the receiver's order.
        clocks: CPU time of the sending side of each method.
        source: What is pushed.
    """

    control: Control
    pushes: dict[Method, Push]
    clocks: dict[Method, CpuClock]
    source: Source

    def measure(self, plan: PushPlan, num_runs: int) -> dict[Method, Samples]:
        """Return interleaved runs of every method; the first push of each is not counted."""
        methods = list(self.pushes)
        samples = {method: Samples() for method in methods}
        expected = self.source.digest(plan)
        for method in methods:
            self._run(method, plan, expected, 1, Samples())
        num_pushes = min(max(1, _RUN_BYTES // plan.num_bytes), _MAX_PUSHES_PER_RUN)
        for run in range(num_runs):
            first = run % len(methods)  # nobody always comes after the same one
            for method in methods[first:] + methods[:first]:
                self._run(method, plan, expected, num_pushes, samples[method])
        return samples

    def _run(
        self, method: Method, plan: PushPlan, expected: int, num_pushes: int, samples: Samples
    ) -> None:
        """Add one run to `samples`; what landed is compared with the source after each push.

        Raises:
            ControlError: It is something else.
        """
        push, clock, control = self.pushes[method], self.clocks[method], self.control
        number = list(self.pushes).index(method)
        total_s = 0.0
        for _ in range(num_pushes):
            control.send(Kind.BEGIN, number, plan.number)
            control.expect(Kind.READY)
            cpu_ns = clock()
            started_s = time.perf_counter()
            push.run(plan, control)
            total_s += time.perf_counter() - started_s
            samples.sender_cpu_s += (clock() - cpu_ns) / 1e9
            control.send(Kind.CHECK)
            found = control.expect(Kind.FOUND)
            if found.first != expected:
                raise ControlError(f"{method} of {plan.label}: other bytes landed than were sent")
            samples.receiver_cpu_s += found.second / 1e9
            samples.pushed_bytes += plan.num_bytes
        samples.push_s.append(total_s / num_pushes)


@contextlib.contextmanager
def connected(receiver_core: int | None) -> Iterator[Sender]:
    """Start the receiver and connect every usable method.

    Args:
        receiver_core: Where to pin the receiver; this process pins itself before.
    """
    with contextlib.ExitStack() as undo:
        socket_dir = Path(undo.enter_context(tempfile.TemporaryDirectory())) / "kv"
        memory_fd = os.memfd_create("tandem-bench", os.MFD_CLOEXEC)
        undo.callback(os.close, memory_fd)
        os.ftruncate(memory_fd, POOL_BYTES)
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = _start_receiver(theirs, memory_fd)
        undo.callback(_end, process)
        undo.callback(connection.close)  # tells it to end
        connection.settimeout(TIMEOUT_S)
        order = {"core": receiver_core, "socket_dir": str(socket_dir)}
        connection.send(json.dumps(order).encode())
        report = json.loads(connection.recv(MAX_ORDER_BYTES))
        source = Source()
        pushes, clocks = _connect(report, source, socket_dir, memory_fd, undo)
        yield Sender(
            control=Control(connection),
            pushes={method: pushes[method] for method in usable_methods()},
            clocks=clocks,
            source=source,
        )


def _start_receiver(theirs: socket.socket, memory_fd: int) -> subprocess.Popen[bytes]:
    with theirs:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.transfer.receiver",
                str(theirs.fileno()),
                str(memory_fd),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory_fd),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def _connect(
    report: dict[str, Any],
    source: Source,
    socket_dir: Path,
    memory_fd: int,
    undo: contextlib.ExitStack,
) -> tuple[dict[Method, Push], dict[Method, CpuClock]]:
    """Return what pushes by each method, and its CPU time on this side."""
    address = source.address
    mapping = mmap.mmap(memory_fd, POOL_BYTES)
    pushes: dict[Method, Push] = {Method.MEMCPY: MemcpyPush(address, mapping)}
    clocks = dict.fromkeys(Method, cpu_clock([os.getpid()]))

    connection = socket.create_connection((HOST, report[Method.TCP]), _CONNECT_TIMEOUT_S)
    undo.callback(connection.close)
    connection.setblocking(True)
    pushes[Method.TCP] = SocketPush(source.memory, connection)

    descriptor = descriptor_from_json(report[Method.SHM])
    for method, engine in (
        (Method.SHM, ShmEngine(socket_dir)),
        (Method.SHM_NO_DIGEST, ShmEngine(socket_dir, new_digest=NullDigest)),
    ):
        link = engine.connect(descriptor, _INCARNATION, _CONNECT_TIMEOUT_S)
        undo.callback(link.close)
        pushes[method] = LinkPush(address, link)

    if Method.MOONCAKE in report:
        _connect_mooncake(report, source, pushes, clocks, undo)
    return pushes, clocks


def _connect_mooncake(
    report: dict[str, Any],
    source: Source,
    pushes: dict[Method, Push],
    clocks: dict[Method, CpuClock],
    undo: contextlib.ExitStack,
) -> None:
    naive = NaiveEngine(HOST)
    naive.register(source.address, source.memory.nbytes)
    place = report[Method.MOONCAKE_NAIVE]
    pushes[Method.MOONCAKE_NAIVE] = NaivePush(
        source.address, naive, place["session"], place["base"]
    )
    descriptor = descriptor_from_json(report[Method.MOONCAKE])
    settings = MooncakeSettings(host=HOST)
    for method, engine in (
        (Method.MOONCAKE, MooncakeEngine(settings)),
        (Method.MOONCAKE_NO_DIGEST, MooncakeEngine(settings, new_digest=NullDigest)),
    ):
        link = engine.connect(descriptor, _INCARNATION, _CONNECT_TIMEOUT_S)
        undo.callback(link.close)
        pushes[method] = StagedPush(source.address, link)
        clocks[method] = cpu_clock([os.getpid(), link.sender_pid])
