"""The engine between hosts: Mooncake's transfer engine, each one in a process that can be killed.

Mooncake moves bytes well while all goes well. Its faults are what this module is about: after a
failure it goes on writing, a first contact may block for a minute, a used id crashes the process,
its ports are open to everybody. So a target has a receiving engine of its own, a link a sending
one, both in processes that share memory with this one. Killing the receiver's process is the fence
of a target: nothing lands after `close`. That fence is for all writers of the target at once and
only the owner of the target can use it, so `can_fence_writer` is false: what is written is a
staging area, and each writer should get a target of its own.

Whether a writer may come in, where to write, and whether the other side is still there is settled
at a door, a TCP socket of our own beside Mooncake's.
"""

import contextlib
import ctypes
import ipaddress
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kv_transfer.digest import NewDigest, new_xxh3
from kv_transfer.engine.base import TargetDescriptor, WriterState
from kv_transfer.engine.door import Door, DoorLimits
from kv_transfer.engine.door_protocol import (
    ACCESS_KEY_BYTES,
    ANSWER_BYTES,
    Answer,
    Hello,
    decode_answer,
    encode_answer,
    encode_hello,
)
from kv_transfer.engine.mooncake_link import BOUNCE_BYTES, MooncakeLink
from kv_transfer.engine.mooncake_process import (
    MooncakeOrder,
    MooncakeProcess,
    MooncakeStartError,
    run_check,
)
from kv_transfer.engine.sealed_memory import check_available, sealed_memory
from kv_transfer.errors import (
    ConnectError,
    EngineConfigError,
    PeerRefusedError,
    TargetAllocationError,
)

_BACKLOG = 64
# Behind the target's memory: where the first contact writes.
_SCRATCH_BYTES = 4096
_START_TIMEOUT_S = 20.0
_PLACE = struct.Struct("<HQ")  # port of the receiving engine, address of the memory there
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 5, 2, 3
_NAME_LIMITS = DoorLimits()
# Files that are there when the transport's device is; the package itself takes any name and then
# uses TCP.
_DEVICE_PATHS = {"rdma": "/sys/class/infiniband", "ascend": "/dev/davinci_manager"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """How engines are reached.

    Attributes:
        host: Address of this host for its peers: an IPv4 address or a name.
        allow_network: Whether peers of other hosts may reach the ports, which ask for no key.
        protocol: Transport: tcp, rdma or ascend.
        device: Names of the transport's devices; empty takes all.
    """

    host: str = "127.0.0.1"
    allow_network: bool = False
    protocol: str = "tcp"
    device: str = ""


class _MooncakeDoorkeeper:
    """Tells writers where to write, and remembers who came."""

    def __init__(self, place: bytes, size_bytes: int) -> None:
        self._place = place
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, None] = OrderedDict()

    def welcome(self, connection: socket.socket, hello: Hello) -> Answer | None:
        """As the protocol says."""
        with self._lock:
            self._seen[hello.incarnation] = None
            while len(self._seen) > _NAME_LIMITS.max_dead:
                self._seen.popitem(last=False)
        message = encode_answer(Answer.ACCEPTED, self._size_bytes) + self._place
        try:
            num_sent = connection.send(message)
        except OSError:
            return None
        return Answer.ACCEPTED if num_sent == len(message) else None

    def knows(self, incarnation: str) -> bool:
        """Tell whether an incarnation was let in."""
        with self._lock:
            return incarnation in self._seen

    def close(self) -> None:
        """As the protocol says."""
        with self._lock:
            self._seen.clear()


class MooncakeTarget:
    """Memory that one receiving engine writes into."""

    def __init__(self, settings: MooncakeSettings, num_bytes: int) -> None:
        """Allocate the memory, start the receiver and open the door.

        Raises:
            TargetAllocationError: One of them cannot be had.
        """
        self._owner_pid = os.getpid()
        self._is_closed = False
        mapped_bytes = num_bytes + _SCRATCH_BYTES
        access_key = secrets.token_bytes(ACCESS_KEY_BYTES)
        try:
            with contextlib.ExitStack() as undo:
                memory_fd = sealed_memory(mapped_bytes)
                undo.callback(os.close, memory_fd)
                self._mapping = mmap.mmap(memory_fd, mapped_bytes)
                self._process = MooncakeProcess(
                    _order(settings, "receiver", size_bytes=mapped_bytes),
                    memory_fd,
                    _START_TIMEOUT_S,
                )
                undo.callback(self._process.kill)
                listener = _listen(settings.host)
                undo.callback(listener.close)
                report = self._process.report
                self._keeper = _MooncakeDoorkeeper(
                    _PLACE.pack(report["rpc_port"], report["base"]), num_bytes
                )
                self._door = Door(
                    listener=listener,
                    access_key=access_key,
                    size_bytes=num_bytes,
                    limits=DoorLimits(),
                    keeper=self._keeper,
                )
                undo.pop_all()
        except (OSError, OverflowError, MooncakeStartError) as error:
            raise TargetAllocationError(f"{num_bytes} bytes of memory: {error}") from error
        os.close(memory_fd)
        self.buffer = memoryview(self._mapping)[:num_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.descriptor = TargetDescriptor(
            engine=MooncakeEngine.name,
            address=f"{settings.host}:{listener.getsockname()[1]}",
            access_key=access_key,
            size_bytes=num_bytes,
        )

    @property
    def receiver_pid(self) -> int:
        """Process of the receiving engine."""
        return self._process.pid

    def writer_state(self, prefill_incarnation: str) -> WriterState:
        """ALIVE for who was let in: a writer of another host cannot be proven dead."""
        known = self._keeper.knows(prefill_incarnation)
        return WriterState.ALIVE if known else WriterState.UNKNOWN

    def receives(self) -> bool:
        """Tell whether the receiving engine is running."""
        return not self._process.is_dead()

    def close(self) -> None:
        """As the protocol says: after it nothing is written into the memory any more, by anybody.

        A forked child leaves the target to its parent.
        """
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        self._process.kill()
        self._door.close()
        self.buffer = memoryview(b"")
        del self._mapping  # goes with the last view


class MooncakeEngine:
    """Targets and links over Mooncake."""

    name = "mooncake"
    can_fence_writer = False

    def __init__(self, settings: MooncakeSettings, new_digest: NewDigest = new_xxh3) -> None:
        """Check that the package and the transport can be used here.

        Args:
            settings: How engines are reached.
            new_digest: What writes digest with.

        Raises:
            EngineConfigError: They cannot, or the host would open the ports without permission.
        """
        if ":" in settings.host or not settings.host:
            raise EngineConfigError("kv_host", settings.host, "an IPv4 address or a name")
        if not settings.allow_network and not is_loopback(settings.host):
            raise EngineConfigError(
                "kv_host", settings.host, "a loopback address unless the KV network is trusted"
            )
        device_path = _DEVICE_PATHS.get(settings.protocol)
        if device_path is not None and not _has_device(Path(device_path)):
            raise EngineConfigError("kv_protocol", settings.protocol, f"a device in {device_path}")
        if find_spec("mooncake") is None:
            raise EngineConfigError(
                "kv_engine", "mooncake", "the package mooncake-transfer-engine-non-cuda installed"
            )
        try:
            run_check(settings.host, settings.protocol, settings.device, _START_TIMEOUT_S)
        except MooncakeStartError as error:
            limit = "a package that loads (on Debian it needs libibverbs1, libnuma1 and libcurl4)"
            raise EngineConfigError("kv_engine", f"mooncake: {error}", limit) from error
        self._settings = settings
        self._new_digest = new_digest

    def create_target(self, num_bytes: int) -> MooncakeTarget:
        """As the protocol says."""
        if num_bytes <= 0:
            raise EngineConfigError("num_bytes", num_bytes, ">= 1")
        check_available(num_bytes)
        return MooncakeTarget(self._settings, num_bytes)

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> MooncakeLink:
        """As the protocol says. The first contact with the engine there is made here as well."""
        if descriptor.engine != self.name:
            raise EngineConfigError("descriptor.engine", descriptor.engine, self.name)
        hello = encode_hello(descriptor.access_key, prefill_incarnation)
        host, port = _split(descriptor.address)
        deadline_s = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_connect(host, port, timeout_s))
            engine_port, base = _ask_for_place(connection, hello, descriptor.size_bytes, deadline_s)
            bounce_fd = sealed_memory(BOUNCE_BYTES)
            undo.callback(os.close, bounce_fd)
            bounce = mmap.mmap(bounce_fd, BOUNCE_BYTES)
            order = _order(
                self._settings,
                "sender",
                size_bytes=BOUNCE_BYTES,
                session=f"{host}:{engine_port}",
                scratch_address=base + descriptor.size_bytes,
                scratch_bytes=_SCRATCH_BYTES,
            )
            try:
                process = MooncakeProcess(order, bounce_fd, deadline_s - time.monotonic())
            except MooncakeStartError as error:
                raise ConnectError(f"{descriptor.address}: {error}") from error
            undo.pop_all()
        os.close(bounce_fd)
        return MooncakeLink(
            connection=connection,
            process=process,
            bounce=bounce,
            target_address=base,
            target_bytes=descriptor.size_bytes,
            new_digest=self._new_digest,
        )


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _order(settings: MooncakeSettings, role: str, **rest: int | str) -> MooncakeOrder:
    return MooncakeOrder(
        role=role,  # type: ignore[arg-type]
        host=settings.host,
        protocol=settings.protocol,
        device=settings.device,
        confine=not settings.allow_network,
        **rest,  # type: ignore[arg-type]
    )


def _has_device(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _listen(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise EngineConfigError("descriptor.address", address, "host:port")
    return host, int(port)


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), max(timeout_s, 1e-3))
    except OSError as error:
        raise ConnectError(f"{host}:{port}: {error}") from error
    # A host that is gone closes nothing; only silence tells.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    return connection


def _ask_for_place(
    connection: socket.socket, hello: bytes, size_bytes: int, deadline_s: float
) -> tuple[int, int]:
    """Say hello and return the port of the receiving engine and the address of its memory.

    Raises:
        ConnectError: No answer in time, or the target is busy.
        PeerRefusedError: The target refuses, or is not what the descriptor says.
    """
    try:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        connection.sendall(hello)
        answer, target_bytes = decode_answer(_receive(connection, ANSWER_BYTES, deadline_s))
        if answer is Answer.BUSY:
            raise ConnectError("the target has too many writers")
        if answer is not Answer.ACCEPTED:
            raise PeerRefusedError(f"the target answered {answer.name}")
        port, base = _PLACE.unpack(_receive(connection, _PLACE.size, deadline_s))
    except TimeoutError as error:
        raise ConnectError("the target did not answer in time") from error
    except OSError as error:
        raise PeerRefusedError(f"the target hung up: {error}") from error
    if target_bytes != size_bytes:
        raise PeerRefusedError(
            f"the target has {target_bytes} bytes, the descriptor says {size_bytes}"
        )
    return port, base


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    raw = b""
    while len(raw) < num_bytes:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        part = connection.recv(num_bytes - len(raw))
        if not part:
            raise PeerRefusedError("the target refused the access key")
        raw += part
    return raw
