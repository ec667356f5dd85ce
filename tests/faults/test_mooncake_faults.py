"""The faults of the bare Mooncake package cannot happen through our engine.

tests/faults/test_mooncake_raw.py reproduces each of them on the package itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kv_transfer.engine.base import CopySpan
from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings, MooncakeTarget
from kv_transfer.engine.mooncake_link import MooncakeLink
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerDeadError,
    TargetAllocationError,
    WriteFaultError,
)
from tests.support.processes import wait_until

MIB = 1 << 20
SIZE = 64 * MIB
CONNECT_S = 20.0
OLD, NEW = 0x11, 0x22


def never() -> bool:
    return False


class Source:
    """Memory filled with one byte."""

    def __init__(self, num_bytes: int, value: int) -> None:
        self._memory = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(self._memory)
        self.num_bytes = num_bytes
        self.fill(value)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.num_bytes)

    def whole(self) -> CopySpan:
        return CopySpan(self.address, 0, self.num_bytes)


@pytest.fixture(scope="module")
def engine() -> MooncakeEngine:
    return MooncakeEngine(MooncakeSettings())


@pytest.fixture
def target(engine: MooncakeEngine) -> Iterator[MooncakeTarget]:
    memory = engine.create_target(SIZE)
    yield memory
    memory.close()


@pytest.fixture
def link(engine: MooncakeEngine, target: MooncakeTarget) -> Iterator[MooncakeLink]:
    connected = engine.connect(target.descriptor, "prefill-1", CONNECT_S)
    yield connected
    connected.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class WriteInBackground:
    """Writes a whole source again and again until that fails."""

    def __init__(self, link: MooncakeLink, source: Source) -> None:
        self.error: Exception | None = None
        self.started = threading.Event()
        self._link = link
        self._source = source
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._link.write([self._source.whole()], never)
                self.started.set()
        except Exception as error:  # the test looks at it
            self.error = error

    def wait(self, timeout_s: float) -> float:
        """Seconds until the writes have failed."""
        started = time.monotonic()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still writing after {timeout_s} s"
        return time.monotonic() - started


def count(target: MooncakeTarget, value: int) -> int:
    return bytes(target.buffer).count(value)


def test_after_a_failed_write_the_reused_source_never_lands(
    target: MooncakeTarget, link: MooncakeLink
) -> None:
    source = Source(SIZE, OLD)
    writing = WriteInBackground(link, source)
    assert writing.started.wait(20)
    with stopped(target.receiver_pid):
        took_s = writing.wait(15)
        assert isinstance(writing.error, WriteFaultError)
        assert not link.proves_quiet()
        assert took_s < 10
        source.fill(NEW)
    # The receiver goes on; what was in its socket buffers may land, but all of it is old.
    time.sleep(1.0)
    assert count(target, NEW) == 0
    with pytest.raises((PeerDeadError, WriteFaultError)):
        link.write([source.whole()], never)


@pytest.mark.parametrize("sender_is_stopped", [False, True], ids=["writing", "stopped"])
def test_nothing_lands_after_the_target_is_closed(
    target: MooncakeTarget, link: MooncakeLink, sender_is_stopped: bool
) -> None:
    view = memoryview(target.buffer)
    writing = WriteInBackground(link, Source(SIZE, OLD))
    assert writing.started.wait(20)
    sender = stopped(link.sender_pid) if sender_is_stopped else contextlib.nullcontext()
    with sender:
        started = time.monotonic()
        target.close()
        assert time.monotonic() - started < 2
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), NEW, SIZE)
    writing.wait(15)
    time.sleep(1.0)
    assert bytes(view).count(NEW) == SIZE


def test_first_contact_with_a_stopped_receiver_ends_in_time_and_holds_up_nobody(
    engine: MooncakeEngine, target: MooncakeTarget, link: MooncakeLink
) -> None:
    stuck = engine.create_target(4096)
    source = Source(MIB, NEW)
    try:
        with stopped(stuck.receiver_pid):
            outcome: list[Exception] = []

            def connect() -> None:
                try:
                    engine.connect(stuck.descriptor, "prefill-1", 3.0)
                except ConnectError as error:
                    outcome.append(error)

            connecting = threading.Thread(target=connect)
            started = time.monotonic()
            connecting.start()
            link.write([source.whole()], never)
            assert time.monotonic() - started < 2, "a healthy peer waited"
            connecting.join(10)
            assert not connecting.is_alive()
            assert time.monotonic() - started < 6
        assert "not ready in time" in str(outcome[0])
    finally:
        stuck.close()
    assert count(target, NEW) == MIB


def test_target_that_is_gone_is_told_and_a_new_one_at_once_is_reached(
    engine: MooncakeEngine, target: MooncakeTarget, link: MooncakeLink
) -> None:
    source = Source(MIB, NEW)
    link.write([source.whole()], never)
    target.close()
    assert link.peer_is_dead()
    with pytest.raises(PeerDeadError):
        link.write([source.whole()], never)
    again = engine.create_target(SIZE)
    try:
        fresh = engine.connect(again.descriptor, "prefill-1", CONNECT_S)
        fresh.write([source.whole()], never)
        assert count(again, NEW) == MIB
        fresh.close()
    finally:
        again.close()


def test_receiver_that_is_killed_fails_the_write_at_once(
    target: MooncakeTarget, link: MooncakeLink
) -> None:
    writing = WriteInBackground(link, Source(SIZE, OLD))
    assert writing.started.wait(20)
    os.kill(target.receiver_pid, signal.SIGKILL)
    assert writing.wait(10) < 5
    assert isinstance(writing.error, WriteFaultError)
    assert not target.receives()


def test_engine_that_crashes_takes_nobody_along(target: MooncakeTarget, link: MooncakeLink) -> None:
    writing = WriteInBackground(link, Source(SIZE, OLD))
    assert writing.started.wait(20)
    os.kill(link.sender_pid, signal.SIGSEGV)
    assert writing.wait(10) < 5
    assert isinstance(writing.error, WriteFaultError)
    assert "engine has ended" in str(writing.error)
    assert link.peer_is_dead()


def test_write_of_more_spans_than_the_package_queues_lands_whole(
    target: MooncakeTarget, link: MooncakeLink
) -> None:
    num_spans, span, stride = 6000, 1000, 2048
    content = random.Random(3).randbytes(num_spans * span)
    source = (ctypes.c_char * len(content)).from_buffer_copy(content)
    address = ctypes.addressof(source)
    link.write([CopySpan(address + i * span, i * stride, span) for i in range(num_spans)], never)
    for index in (0, 1, 2999, num_spans - 1):
        start = index * stride
        expected = content[index * span : (index + 1) * span]
        assert target.buffer[start : start + span] == expected
        assert not any(target.buffer[start + span : start + stride])


def test_forked_child_can_neither_write_nor_close(
    target: MooncakeTarget, link: MooncakeLink
) -> None:
    source = Source(MIB, NEW)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            link.write([source.whole()], never)
        except WriteFaultError:
            link.close()
            target.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    link.write([source.whole()], never)
    assert count(target, NEW) == MIB


def test_ports_on_loopback_take_no_peer_of_the_network(
    target: MooncakeTarget, link: MooncakeLink
) -> None:
    ports = listening_ports(target.receiver_pid) | listening_ports(link.sender_pid)
    assert len(ports) >= 2
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), 2):
            pass  # it listens
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the own address
        own_address = probe.getsockname()[0]
    if own_address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    for port in ports:
        with pytest.raises(OSError, match=r"refused|timed out"):
            socket.create_connection((own_address, port), 2)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{entry}")[8:-1]
        for entry in os.listdir(f"/proc/{pid}/fd")
        if os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:[")
    }
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii") as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(512), b"\xff" * 4096])
def test_garbage_on_any_port_leaves_the_target_working(
    target: MooncakeTarget, link: MooncakeLink, garbage: bytes
) -> None:
    door = int(target.descriptor.address.rpartition(":")[2])
    for port in (*listening_ports(target.receiver_pid), door):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", port), 2) as connection:
                connection.sendall(garbage)
    source = Source(MIB, NEW)
    link.write([source.whole()], never)
    assert target.buffer[:MIB] == bytes([NEW]) * MIB


def test_children_end_with_their_link_and_target(
    engine: MooncakeEngine, target: MooncakeTarget, link: MooncakeLink
) -> None:
    pids = (link.sender_pid, target.receiver_pid)
    link.close()
    target.close()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), timeout_s=5, what=f"{pid} ends")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_meant_for_the_service_end_no_engine(
    target: MooncakeTarget, link: MooncakeLink, number: signal.Signals
) -> None:
    os.kill(link.sender_pid, number)
    os.kill(target.receiver_pid, number)
    source = Source(MIB, NEW)
    link.write([source.whole()], never)
    assert count(target, NEW) == MIB


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.invalid", "", "::1"])
def test_host_that_opens_the_ports_needs_permission(host: str) -> None:
    with pytest.raises(EngineConfigError, match="kv_host"):
        MooncakeEngine(MooncakeSettings(host=host))


@pytest.mark.parametrize("protocol", ["rdma", "ascend"])
def test_transport_without_its_device_is_refused(protocol: str) -> None:
    """The package itself takes any name, and then uses TCP."""
    with pytest.raises(EngineConfigError, match=protocol):
        MooncakeEngine(MooncakeSettings(protocol=protocol))


def test_host_that_is_not_ours_is_an_allocation_error() -> None:
    other = MooncakeEngine(MooncakeSettings(host="192.0.2.77", allow_network=True))
    with pytest.raises(TargetAllocationError):
        other.create_target(4096)
