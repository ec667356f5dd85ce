"""One Mooncake transfer engine in a process of its own; the only import of mooncake.

Run by `MooncakeProcess` as `python -m kv_transfer.engine.mooncake_child CONTROL_FD MEMORY_FD`.

    parent ──order (JSON)──▶ child        what to be: a check, a receiver or a sender
    parent ◀──report (JSON)── child       ready, or what is wrong
    parent ──command──▶ child, child ──reply──▶ parent       a sender's writes, by tag

The process ends when its parent closes the control socket, or is killed by it. That end is what the
package itself does not offer: after it nothing is read from or written to the memory any more, and
whatever the native library was doing (blocking on a stopped peer, spinning, crashing) is over.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COMMAND = struct.Struct("<IQQQ")  # tag, offset in the memory, address at the target, bytes
REPLY = struct.Struct("<Ii")  # tag, status: 1 is done
DONE = 1
MAX_PACKET_BYTES = 4096
_SUBMIT_FAILED = -3
# A transfer that goes well is asked for again and again, giving way to every other thread: a core
# that sleeps in between takes longer to wake than a small transfer. One that goes on for longer
# than this without an end is asked for with sleeps.
_EAGER_S = 2e-3
_POLL_INTERVAL_S = 30e-6
_TCP_LISTEN = "0A"

# What makes the TCP transport bounded and quiet: pooled connections, room for many requests, and
# failures after seconds. The legacy framing reports success before the data is there, and a log
# directory makes the import abort.
_SETTINGS: Mapping[str, str] = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_LOG_LEVEL": "ERROR",
}
_UNSET = ("MC_LOG_DIR", "MC_TCP_PROTO", "MC_USE_TENT", "MC_DISABLE_METACACHE")


class _OrderError(Exception):
    """The order cannot be carried out; the text is reported."""


def main() -> None:
    """Carry out the order and serve until the parent is gone."""
    # A Ctrl-C or a stop of the unit reaches every process; only the parent decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    memory_fd = int(sys.argv[2])
    order = json.loads(control.recv(MAX_PACKET_BYTES))
    try:
        engine = _start_engine(order)
        memory = mmap.mmap(memory_fd, order["size_bytes"] or mmap.PAGESIZE)
        report, serve = _prepare(order, engine, memory, control)
    except _OrderError as error:
        _report(control, {"error": str(error)})
        os._exit(1)
    _report(control, report)
    serve()
    # Without the package's own shutdown, which waits for a second; the kernel cleans up at once.
    os._exit(0)


def _report(control: socket.socket, report: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a parent that has gone needs no report
        control.send(json.dumps(report).encode())


def _start_engine(order: dict[str, Any]) -> Any:
    for name, value in _SETTINGS.items():
        os.putenv(name, value)
    for name in _UNSET:
        os.unsetenv(name)
    if order["protocol"] == "tcp":
        # Else a host with an RDMA device uses it whatever was asked for.
        os.putenv("MC_FORCE_TCP", "1")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise _OrderError(f"the package mooncake cannot be imported: {error}") from error
    engine = TransferEngine()
    if order["role"] == "check":
        return engine
    status = engine.initialize(order["host"], "P2PHANDSHAKE", order["protocol"], order["device"])
    if status != 0:
        raise _OrderError(f"the engine cannot start on {order['host']}: status {status}")
    if order["confine"]:
        confine_to_loopback()
    return engine


def _prepare(
    order: dict[str, Any], engine: Any, memory: mmap.mmap, control: socket.socket
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the report of a started engine and what serves until the parent is gone."""
    if order["role"] == "check":
        return {}, lambda: None
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    status = engine.register_memory(base, order["size_bytes"])
    if status != 0:
        raise _OrderError(f"{order['size_bytes']} bytes cannot be registered: status {status}")
    if order["role"] == "receiver":
        report = {"rpc_port": engine.get_rpc_port(), "base": base}
        return report, lambda: _wait_for_end(control)
    # The first contact with a target may block for a minute. It happens here, and in time.
    session = order["session"]
    if not _write(engine, session, base, order["scratch_address"], order["scratch_bytes"]):
        raise _OrderError(f"the target {session} cannot be written to")
    return {}, lambda: Sender(engine, session, base, control).serve()


def _write(engine: Any, session: str, source: int, target: int, num_bytes: int) -> bool:
    transfer_id = engine.transfer_submit_write(session, source, target, num_bytes)
    if transfer_id == 0:
        return False
    while (status := engine.transfer_check_status(transfer_id)) == 0:
        time.sleep(_POLL_INTERVAL_S)
    return bool(status == DONE)


def _wait_for_end(control: socket.socket) -> None:
    while control.recv(MAX_PACKET_BYTES):
        pass


class Sender:
    """Carries out writes. Each id of the engine is polled to its final state exactly once: the
    engine frees it then, and asking again would crash.
    """

    def __init__(self, engine: Any, session: str, base: int, control: socket.socket) -> None:
        """Write to `session` from the memory at `base`, as `control` says."""
        self._engine = engine
        self._session = session
        self._base = base
        self._control = control
        self._pending: dict[int, int] = {}  # tag -> id

    def serve(self) -> None:
        """Return when the parent has closed its end."""
        eager_until_s = 0.0
        while True:
            flags = socket.MSG_DONTWAIT if self._pending else 0
            try:
                packet = self._control.recv(MAX_PACKET_BYTES, flags)
            except BlockingIOError:
                if self._settle():
                    eager_until_s = time.monotonic() + _EAGER_S
                elif time.monotonic() < eager_until_s:
                    os.sched_yield()
                else:
                    time.sleep(_POLL_INTERVAL_S)
                continue
            except OSError:
                return
            if not packet:
                return
            tag, offset, address, num_bytes = COMMAND.unpack(packet)
            transfer_id = self._engine.transfer_submit_write(
                self._session, self._base + offset, address, num_bytes
            )
            if transfer_id == 0:
                self._reply(tag, _SUBMIT_FAILED)
            else:
                self._pending[tag] = transfer_id
                eager_until_s = time.monotonic() + _EAGER_S

    def _settle(self) -> bool:
        """Reply for what has ended; returns whether anything has."""
        ended: list[int] = []
        for tag, transfer_id in self._pending.items():
            status = self._engine.transfer_check_status(transfer_id)
            if status != 0:
                ended.append(tag)
                self._reply(tag, status)
        for tag in ended:
            del self._pending[tag]
        return bool(ended)

    def _reply(self, tag: int, status: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(REPLY.pack(tag, status))


def confine_to_loopback() -> None:
    """Let the engine's listeners, which are open on all addresses, take loopback peers only.

    Every listening TCP socket of this process is the engine's: the process has nothing else.
    """
    for descriptor in _listening_descriptors():
        listener = socket.socket(fileno=os.dup(descriptor))
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as error:
            raise _OrderError(f"the engine's port cannot be kept to loopback: {error}") from error
        finally:
            listener.close()


def _listening_descriptors() -> list[int]:
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        if path.exists():
            rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()[1:]]
            inodes.update(row[9] for row in rows if row[3] == _TCP_LISTEN)
    found: list[int] = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            name = str(entry.readlink())
            if name.startswith("socket:[") and name[8:-1] in inodes:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
