"""What a shared-memory target and its writers survive: strangers, loiterers, stops and kills."""

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.engine import door_protocol, shm_sockets
from kv_transfer.engine.base import TargetDescriptor, WriterState
from kv_transfer.engine.door import DoorLimits
from kv_transfer.engine.door_protocol import Answer
from kv_transfer.engine.shm import ShmEngine, ShmTarget
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerDeadError,
    PeerRefusedError,
    WriteFaultError,
)
from tests.support.processes import wait_until
from tests.support.transfer_harness import ShmWriterProcess, SourceBytes

SIZE = 4 << 20
LIMITS = DoorLimits(hello_timeout_s=0.2, max_guests=4, max_writers=8, max_processes=8)
SOURCE = SourceBytes(b"\x5a" * SIZE)


def never() -> bool:
    return False


@pytest.fixture
def socket_dir(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def engine(socket_dir: Path) -> ShmEngine:
    return ShmEngine(socket_dir, LIMITS)


@pytest.fixture
def target(engine: ShmEngine) -> Iterator[ShmTarget]:
    memory = engine.create_target(SIZE)
    yield memory
    memory.close()


def knock(target: ShmTarget) -> socket.socket:
    """Connect without saying anything."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(target.descriptor.address)
    return connection


def assert_still_serves(engine: ShmEngine, target: ShmTarget) -> None:
    link = engine.connect(target.descriptor, "honest", 5.0)
    link.write([SOURCE.span(0, 0, 100)], never)
    assert target.buffer[:100] == SOURCE.content[:100]
    link.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
        bytes(door_protocol.HELLO_BYTES),
        b"\xff" * 100_000,
        door_protocol.encode_hello(bytes(32), "prefill"),
        b"TandemKV" + bytes(door_protocol.HELLO_BYTES - 8),
    ],
)
def test_door_hears_garbage_drops_it_and_serves_on(
    engine: ShmEngine, target: ShmTarget, words: bytes
) -> None:
    with knock(target) as stranger:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert not any(target.buffer[:100])
    assert_still_serves(engine, target)


def test_door_name_that_is_no_text_is_dropped(engine: ShmEngine, target: ShmTarget) -> None:
    hello = bytearray(door_protocol.encode_hello(target.descriptor.access_key, "p"))
    hello[-door_protocol.MAX_INCARNATION_BYTES] = 0xFF
    with knock(target) as stranger:
        stranger.sendall(hello)
        assert stranger.recv(100) == b""
    assert_still_serves(engine, target)


def test_door_other_version_is_told(target: ShmTarget) -> None:
    hello = bytearray(door_protocol.encode_hello(target.descriptor.access_key, "p"))
    hello[8] = 99
    with knock(target) as old:
        old.sendall(hello)
        answer, fds, _, _ = socket.recv_fds(old, 100, 4)
        assert door_protocol.decode_answer(answer)[0] is Answer.WRONG_VERSION
        assert fds == []


def test_door_slow_hello_is_dropped_at_its_deadline(engine: ShmEngine, target: ShmTarget) -> None:
    with knock(target) as loiterer:
        loiterer.sendall(door_protocol.encode_hello(target.descriptor.access_key, "slow")[:-1])
        assert loiterer.recv(100) == b""
    assert target.writer_state("slow") is WriterState.UNKNOWN
    assert_still_serves(engine, target)


def test_door_hello_in_single_bytes_is_let_in(target: ShmTarget) -> None:
    with knock(target) as slow:
        for byte in door_protocol.encode_hello(target.descriptor.access_key, "bytewise"):
            slow.send(bytes([byte]))
        answer, fds, _, _ = socket.recv_fds(slow, 100, 1)
        assert door_protocol.decode_answer(answer) == (Answer.ACCEPTED, SIZE)
        for fd in fds:
            os.close(fd)


def test_door_crowd_of_loiterers_keeps_no_writer_out(engine: ShmEngine, target: ShmTarget) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(knock(target))
        assert_still_serves(engine, target)


def test_door_too_many_writers_are_told_busy_until_one_leaves(
    engine: ShmEngine, target: ShmTarget
) -> None:
    links = [engine.connect(target.descriptor, "p", 5.0) for _ in range(LIMITS.max_writers)]
    with pytest.raises(ConnectError) as caught:
        engine.connect(target.descriptor, "p", 5.0)
    assert caught.value.retryable
    links.pop().close()

    def is_let_in() -> bool:
        try:
            links.append(engine.connect(target.descriptor, "p", 5.0))
        except ConnectError:
            return False
        return True

    wait_until(is_let_in, timeout_s=5, what="a place is free")
    for link in links:
        link.close()


def test_door_writer_speaking_out_of_turn_is_dropped(engine: ShmEngine, target: ShmTarget) -> None:
    with knock(target) as chatty:
        chatty.sendall(door_protocol.encode_hello(target.descriptor.access_key, "chatty"))
        _, fds, _, _ = socket.recv_fds(chatty, 100, 1)
        os.close(fds[0])
        chatty.sendall(b"hello again")
        with contextlib.suppress(ConnectionResetError):
            assert chatty.recv(1) == b""
    assert_still_serves(engine, target)


def test_door_passed_descriptors_are_not_kept(target: ShmTarget) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with knock(target) as stranger:
        hello = door_protocol.encode_hello(bytes(32), "p")
        socket.send_fds(stranger, [hello], [0, 1, 2])
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    # The door closes its end a moment after the stranger sees the refusal.
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= before,
        timeout_s=5.0,
        what="the passed descriptors are closed",
    )


def test_door_without_descriptors_left_serves_again_later(
    engine: ShmEngine, target: ShmTarget
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    num_open = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    try:
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for connection in waiting:
            connection.connect(target.descriptor.address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
        for connection in waiting:
            connection.close()
    assert_still_serves(engine, target)


def test_writer_killed_while_writing_is_proven_dead(
    engine: ShmEngine, target: ShmTarget, socket_dir: Path
) -> None:
    writer = ShmWriterProcess(socket_dir, target.descriptor, "doomed", mode="write")
    writer.expect("wrote")
    writer.kill()
    assert target.writer_state("doomed") is WriterState.DEAD
    snapshot = bytes(target.buffer)
    assert_still_serves(engine, target)
    assert target.buffer[100:] == snapshot[100:]


def test_writer_stopped_is_not_dead(engine: ShmEngine, target: ShmTarget, socket_dir: Path) -> None:
    writer = ShmWriterProcess(socket_dir, target.descriptor, "stopped", mode="write")
    writer.expect("wrote")
    writer.process.send_signal(signal.SIGSTOP)
    try:
        assert target.writer_state("stopped") is WriterState.ALIVE
        assert_still_serves(engine, target)
    finally:
        writer.kill()
    assert target.writer_state("stopped") is WriterState.DEAD


def test_writer_restarted_under_the_same_incarnation_lives_again(
    target: ShmTarget, socket_dir: Path
) -> None:
    ShmWriterProcess(socket_dir, target.descriptor, "phoenix", mode="idle").kill()
    assert target.writer_state("phoenix") is WriterState.DEAD
    second = ShmWriterProcess(socket_dir, target.descriptor, "phoenix", mode="idle")
    assert target.writer_state("phoenix") is WriterState.ALIVE
    second.kill()
    assert target.writer_state("phoenix") is WriterState.DEAD


def test_writers_come_and_die_without_leaking_what_held_them(
    target: ShmTarget, socket_dir: Path
) -> None:
    ShmWriterProcess(socket_dir, target.descriptor, "w", mode="idle").kill()
    assert target.writer_state("w") is WriterState.DEAD
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        ShmWriterProcess(socket_dir, target.descriptor, f"w{number}", mode="idle").kill()
        assert target.writer_state(f"w{number}") is WriterState.DEAD
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) == before, timeout_s=5, what="all is closed"
    )


TARGET_PROCESS = """
import sys
from pathlib import Path
from kv_transfer.engine.shm import ShmEngine
target = ShmEngine(Path(sys.argv[1])).create_target(int(sys.argv[2]))
print(target.descriptor.address, target.descriptor.access_key.hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(
    socket_dir: Path,
) -> Iterator[tuple[subprocess.Popen[str], TargetDescriptor]]:
    """A process with a target, and how to reach it."""
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET_PROCESS, str(socket_dir), str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address, key = process.stdout.readline().split()
    with process:
        yield (
            process,
            TargetDescriptor(
                engine="shm", address=address, access_key=bytes.fromhex(key), size_bytes=SIZE
            ),
        )
        process.kill()


def test_reader_killed_during_a_write_is_a_dead_peer(
    engine: ShmEngine, other_process: tuple[subprocess.Popen[str], TargetDescriptor]
) -> None:
    process, descriptor = other_process
    link = engine.connect(descriptor, "p", 5.0)
    pieces: list[None] = []

    def kill_in_the_second_piece() -> bool:
        pieces.append(None)
        if len(pieces) == 2:
            process.kill()
            process.wait(10)
        return False

    with pytest.raises(PeerDeadError):
        link.write([SOURCE.span(0, 0, SIZE)], kill_in_the_second_piece)
    assert len(pieces) == 2
    assert link.peer_is_dead()
    link.close()
    assert link.peer_is_dead()


def test_reader_stopped_holds_up_no_writer(
    engine: ShmEngine, other_process: tuple[subprocess.Popen[str], TargetDescriptor]
) -> None:
    process, descriptor = other_process
    link = engine.connect(descriptor, "p", 5.0)
    process.send_signal(signal.SIGSTOP)
    link.write([SOURCE.span(0, 0, SIZE)], never)
    assert not link.peer_is_dead()
    with pytest.raises(ConnectError, match="in time"):
        engine.connect(descriptor, "p", 0.1)
    link.close()


def test_engine_next_start_removes_the_sockets_of_the_dead(
    engine: ShmEngine,
    target: ShmTarget,
    socket_dir: Path,
    other_process: tuple[subprocess.Popen[str], TargetDescriptor],
) -> None:
    process, descriptor = other_process
    process.kill()
    process.wait(10)
    assert Path(descriptor.address).exists()
    engine.create_target(4096).close()
    assert list(socket_dir.iterdir()) == [Path(target.descriptor.address)]
    assert_still_serves(engine, target)


class Impostor:
    """Answers one writer with whatever a test wants, from inside the right directory."""

    def __init__(self, socket_dir: Path, answer: bytes, fd: int | None) -> None:
        self._listener, self.path = shm_sockets.listen(socket_dir, "0" * 32, 1)
        self._listener.setblocking(True)
        self._answer, self._fd = answer, fd
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, self._listener:
            connection.recv(door_protocol.HELLO_BYTES)
            socket.send_fds(connection, [self._answer], [] if self._fd is None else [self._fd])
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def refuses(self, engine: ShmEngine) -> str:
        """Connect to it, expect a refusal, and return its words."""
        descriptor = TargetDescriptor(
            engine="shm", address=str(self.path), access_key=bytes(32), size_bytes=4096
        )
        with pytest.raises(PeerRefusedError) as caught:
            engine.connect(descriptor, "p", 5.0)
        self._thread.join(10)
        return str(caught.value)


@contextlib.contextmanager
def memory(*, num_bytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("impostor", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ACCEPTED = door_protocol.encode_answer(Answer.ACCEPTED, 4096)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_link_memory_that_can_shrink_is_refused(
    engine: ShmEngine, socket_dir: Path, seals: int
) -> None:
    with memory(num_bytes=4096, seals=seals) as fd:
        assert "seals" in Impostor(socket_dir, ACCEPTED, fd).refuses(engine)


def test_link_memory_shorter_than_said_is_refused(engine: ShmEngine, socket_dir: Path) -> None:
    with memory(num_bytes=100, seals=ALL_SEALS) as fd:
        assert "100 bytes" in Impostor(socket_dir, ACCEPTED, fd).refuses(engine)


def test_link_ordinary_file_is_refused(engine: ShmEngine, socket_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened:
        words = Impostor(socket_dir, ACCEPTED, opened.fileno()).refuses(engine)
    assert "memory" in words


@pytest.mark.parametrize(
    "answer",
    [b"x" * door_protocol.ANSWER_BYTES, ACCEPTED, ACCEPTED[:-1], ACCEPTED[:8] + b"\x09" * 12],
)
def test_link_improper_answer_is_refused_and_leaks_nothing(
    engine: ShmEngine, socket_dir: Path, answer: bytes
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    impostor = Impostor(socket_dir, answer, None)
    impostor.refuses(engine)
    # The door closes its end a moment after the stranger sees the refusal.
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= before,
        timeout_s=5.0,
        what="the passed descriptors are closed",
    )


def test_link_refused_memory_is_closed(engine: ShmEngine, socket_dir: Path) -> None:
    with memory(num_bytes=100, seals=ALL_SEALS) as fd:
        before = len(os.listdir("/proc/self/fd"))
        Impostor(socket_dir, ACCEPTED, fd).refuses(engine)
        # The door closes its end a moment after the stranger sees the refusal.
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= before,
        timeout_s=5.0,
        what="the passed descriptors are closed",
    )


@pytest.mark.parametrize(
    "name",
    [
        "../kv-" + "0" * 32 + ".sock",
        "sub/kv-" + "0" * 32 + ".sock",
        "kv-" + "0" * 31 + ".sock",
        "kv-" + "0" * 32 + ".sock\0",
        "/etc/passwd",
        "",
    ],
)
def test_connect_address_outside_the_directory_is_refused(
    engine: ShmEngine, target: ShmTarget, socket_dir: Path, name: str
) -> None:
    descriptor = TargetDescriptor(
        engine="shm",
        address=f"{socket_dir}/{name}" if not name.startswith("/") else name,
        access_key=target.descriptor.access_key,
        size_bytes=SIZE,
    )
    with pytest.raises(EngineConfigError, match=r"descriptor\.address"):
        engine.connect(descriptor, "p", 1.0)


def test_connect_symlink_or_file_in_place_of_the_socket_is_refused(
    engine: ShmEngine, target: ShmTarget, socket_dir: Path
) -> None:
    link = socket_dir / ("kv-" + "1" * 32 + ".sock")
    link.symlink_to(target.descriptor.address)
    descriptor = TargetDescriptor(
        engine="shm",
        address=str(link),
        access_key=target.descriptor.access_key,
        size_bytes=SIZE,
    )
    with pytest.raises(PeerRefusedError):
        engine.connect(descriptor, "p", 1.0)
    link.unlink()


def test_connect_incarnation_that_does_not_fit_is_refused(
    engine: ShmEngine, target: ShmTarget
) -> None:
    for incarnation in ("", "p" * (door_protocol.MAX_INCARNATION_BYTES + 1)):
        with pytest.raises(EngineConfigError, match="prefill_incarnation"):
            engine.connect(target.descriptor, incarnation, 1.0)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o600])
def test_engine_directory_that_others_may_enter_is_refused(socket_dir: Path, mode: int) -> None:
    socket_dir.mkdir()
    socket_dir.chmod(mode)
    with pytest.raises(EngineConfigError, match="socket_dir"):
        ShmEngine(socket_dir)


def test_engine_directory_missing_parent_file_or_too_long_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for unfit in (tmp_path / "a" / "b", file, tmp_path / ("n" * 100)):
        with pytest.raises(EngineConfigError, match="socket_dir"):
            ShmEngine(unfit)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_engine_directory_of_another_user_is_refused(socket_dir: Path) -> None:
    socket_dir.mkdir(mode=0o700)
    os.chown(socket_dir, 12345, -1)
    with pytest.raises(EngineConfigError, match="12345"):
        ShmEngine(socket_dir)


def test_target_socket_is_for_its_user_only(target: ShmTarget, socket_dir: Path) -> None:
    mode = Path(target.descriptor.address).lstat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700


def test_target_memory_cannot_be_resized_by_a_writer(target: ShmTarget) -> None:
    with knock(target) as writer:
        writer.sendall(door_protocol.encode_hello(target.descriptor.access_key, "p"))
        _, fds, _, _ = socket.recv_fds(writer, 100, 1)
        try:
            for size in (0, SIZE - 1, SIZE + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(fds[0], size)
            assert os.fstat(fds[0]).st_blocks * 512 >= SIZE  # allocated, not promised
        finally:
            os.close(fds[0])


def test_forked_child_leaves_target_and_link_to_its_parent(
    engine: ShmEngine, target: ShmTarget
) -> None:
    link = engine.connect(target.descriptor, "p", 5.0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            link.write([SOURCE.span(0, 0, 1)], never)
        except WriteFaultError:
            link.close()
            target.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert target.buffer[0] == 0
    link.write([SOURCE.span(0, 0, SIZE)], never)
    assert target.buffer == SOURCE.content
    assert not link.peer_is_dead()
    link.close()
    assert_still_serves(engine, target)


def test_target_mapped_elsewhere_sees_the_same_bytes(target: ShmTarget) -> None:
    with knock(target) as writer:
        writer.sendall(door_protocol.encode_hello(target.descriptor.access_key, "p"))
        _, fds, _, _ = socket.recv_fds(writer, 100, 1)
        with mmap.mmap(fds[0], SIZE) as mapped:
            os.close(fds[0])
            mapped[SIZE - 1] = 77
            assert target.buffer[SIZE - 1] == 77
