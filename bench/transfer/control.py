"""What sender and receiver say to each other beside the bytes, over a socket of packets.

sender                              receiver
  BEGIN method, plan ─────────────▶
                     ◀───────────── READY
  ... the push ...                  ... lands ...
  DONE digest ────────────────────▶                  (one-sided methods)
  LOADED slot, digest ────────────▶                  (staged method, per slot)
                     ◀───────────── FREED slot       (staged method, per slot)
                     ◀───────────── LANDED           (all but the staged method)
  CHECK ──────────────────────────▶
                     ◀───────────── FOUND digest of what landed, CPU of the push
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

_PACKET = struct.Struct("<BQQ")
TIMEOUT_S = 30.0


class Kind(IntEnum):
    """What a message says; its two numbers are named in the module docstring."""

    BEGIN = 1
    READY = 2
    DONE = 3
    LOADED = 4
    FREED = 5
    LANDED = 6
    CHECK = 7
    FOUND = 8


class Message(NamedTuple):
    """One packet."""

    kind: Kind
    first: int
    second: int


class ControlError(Exception):
    """The other process has gone or says something unexpected."""


class Control:
    """One end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Own the socket."""
        connection.settimeout(TIMEOUT_S)
        self._connection = connection

    def send(self, kind: Kind, first: int = 0, second: int = 0) -> None:
        """Say something."""
        self._connection.send(_PACKET.pack(kind, first, second))

    def receive(self) -> Message | None:
        """Return the next message; None when the other end is closed."""
        raw = self._connection.recv(_PACKET.size)
        if not raw:
            return None
        kind, first, second = _PACKET.unpack(raw)
        return Message(Kind(kind), first, second)

    def expect(self, kind: Kind) -> Message:
        """Return the next message, which must be of a kind.

        Raises:
            ControlError: It is not, or the other process has gone.
        """
        message = self.receive()
        if message is None:
            raise ControlError("the other process has gone")
        if message.kind is not kind:
            raise ControlError(f"{message.kind.name} came instead of {kind.name}")
        return message
