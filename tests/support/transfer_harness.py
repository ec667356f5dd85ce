"""What the conformance suite needs of each transfer engine beside its protocol.

A harness makes engines for both sides, and a remote writer that can be killed. A new engine joins
the suite with a harness of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kv_transfer.engine.base import (
    MAX_BYTES_BETWEEN_CHECKS,
    CopySpan,
    TargetDescriptor,
    TransferEngine,
)
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings
from kv_transfer.engine.mooncake_link import BOUNCE_BYTES, MooncakeLink
from kv_transfer.engine.shm import ShmEngine
from tests.support.processes import wait_until


class RemoteWriter(Protocol):
    """A connected writer."""

    def kill(self) -> None:
        """End its process without warning; returns when it has ended."""


class EngineHarness(Protocol):
    """One engine under test."""

    target_engine: TransferEngine
    writer_engine: TransferEngine
    max_bytes_in_flight: int  # between a check of `should_stop` and what the target shows

    def start_writer(self, descriptor: TargetDescriptor, incarnation: str) -> RemoteWriter:
        """Return a writer that is connected."""


class ShmWriterProcess:
    """A process of `tests.support.shm_writer`."""

    def __init__(
        self, socket_dir: Path, descriptor: TargetDescriptor, incarnation: str, *, mode: str
    ) -> None:
        """Start it and wait until it is connected."""
        order = {
            "socket_dir": str(socket_dir),
            "address": descriptor.address,
            "access_key": descriptor.access_key.hex(),
            "size_bytes": descriptor.size_bytes,
            "incarnation": incarnation,
            "mode": mode,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shm_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.expect("connected")

    def expect(self, line: str) -> None:
        """Read the next line of its output."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class _LoopbackWriter:
    def __init__(self, end: Callable[[], None]) -> None:
        self.kill = end


class LoopbackHarness:
    """Both sides share one engine; a writer's death is told."""

    max_bytes_in_flight = MAX_BYTES_BETWEEN_CHECKS

    def __init__(self) -> None:
        """Make the engine."""
        self.target_engine = LoopbackEngine()
        self.writer_engine = self.target_engine

    def start_writer(self, descriptor: TargetDescriptor, incarnation: str) -> RemoteWriter:
        """As the protocol says."""
        self.writer_engine.connect(descriptor, incarnation, 1.0)
        return _LoopbackWriter(lambda: self.writer_engine.end_writer(incarnation))


class ShmHarness:
    """Each side has its engine, over one directory."""

    max_bytes_in_flight = MAX_BYTES_BETWEEN_CHECKS

    def __init__(self, socket_dir: Path) -> None:
        """Make both engines."""
        self.socket_dir = socket_dir
        self.target_engine = ShmEngine(socket_dir)
        self.writer_engine = ShmEngine(socket_dir)

    def start_writer(self, descriptor: TargetDescriptor, incarnation: str) -> ShmWriterProcess:
        """As the protocol says."""
        return ShmWriterProcess(self.socket_dir, descriptor, incarnation, mode="idle")


class MooncakeHarness:
    """Each side has its engine; every target and every link is a process."""

    max_bytes_in_flight = BOUNCE_BYTES

    def __init__(self) -> None:
        """Make both engines."""
        self.target_engine = MooncakeEngine(MooncakeSettings())
        self.writer_engine = MooncakeEngine(MooncakeSettings())

    def start_writer(self, descriptor: TargetDescriptor, incarnation: str) -> RemoteWriter:
        """As the protocol says: the sending process of a link is what dies."""
        link = self.writer_engine.connect(descriptor, incarnation, 10.0)
        return _MooncakeWriter(link)


class _MooncakeWriter:
    def __init__(self, link: MooncakeLink) -> None:
        self._link = link

    def kill(self) -> None:
        os.kill(self._link.sender_pid, signal.SIGKILL)
        wait_until(self._link.peer_is_dead, timeout_s=10, what="the sender ends")
        self._link.close()


class SourceBytes:
    """Source memory with known content, by address."""

    def __init__(self, content: bytes) -> None:
        """Copy the content to memory that stays where it is."""
        self._memory = (ctypes.c_char * len(content)).from_buffer(bytearray(content))
        self.content = content
        self.address = ctypes.addressof(self._memory)

    def span(self, start: int, target_offset: int, num_bytes: int) -> CopySpan:
        """Return a copy from an offset in the source to one in the target."""
        return CopySpan(self.address + start, target_offset, num_bytes)
