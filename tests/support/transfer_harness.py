"""What the conformance suite needs of each transfer engine beside its protocol.

A harness makes engines for both sides, and a remote writer that can be killed. A new engine joins
the suite with a harness of its own.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kv_transfer.engine.base import CopySpan, TargetDescriptor, TransferEngine
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.shm import ShmEngine


class RemoteWriter(Protocol):
    """A connected writer."""

    def kill(self) -> None:
        """End its process without warning; returns when it has ended."""


class EngineHarness(Protocol):
    """One engine under test."""

    target_engine: TransferEngine
    writer_engine: TransferEngine

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

    def __init__(self, socket_dir: Path) -> None:
        """Make both engines."""
        self.socket_dir = socket_dir
        self.target_engine = ShmEngine(socket_dir)
        self.writer_engine = ShmEngine(socket_dir)

    def start_writer(self, descriptor: TargetDescriptor, incarnation: str) -> ShmWriterProcess:
        """As the protocol says."""
        return ShmWriterProcess(self.socket_dir, descriptor, incarnation, mode="idle")


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
