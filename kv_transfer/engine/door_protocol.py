"""What a writer and the door of a target say to each other, once, over a stream socket.

    writer ──hello (fixed size)──▶ door
    writer ◀──answer, and what the engine adds to it when the writer is accepted── door

Then both keep the connection open and say nothing; its end tells that the other side let go. A
door gives no answer to who does not know the access key.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

from kv_transfer.errors import EngineConfigError, PeerRefusedError

ACCESS_KEY_BYTES = 32
MAX_INCARNATION_BYTES = 64
_MAGIC = b"TandemKV"
_VERSION = 1
_HELLO = struct.Struct(f"<8sI{ACCESS_KEY_BYTES}sB{MAX_INCARNATION_BYTES}s")
_ANSWER = struct.Struct("<8sIQ")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = _ANSWER.size


class Answer(IntEnum):
    """What a target says to a writer that knows the key."""

    ACCEPTED = 0
    BUSY = 1
    WRONG_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a writer says first."""

    version: int
    access_key: bytes = field(repr=False)
    incarnation: str

    @property
    def is_current_version(self) -> bool:
        """Whether both sides speak the same version."""
        return self.version == _VERSION


def encode_hello(access_key: bytes, incarnation: str) -> bytes:
    """Return the bytes of a hello.

    Raises:
        EngineConfigError: The key or the incarnation does not fit.
    """
    name = incarnation.encode()
    if not 1 <= len(name) <= MAX_INCARNATION_BYTES:
        limit = f"1..{MAX_INCARNATION_BYTES} bytes"
        raise EngineConfigError("prefill_incarnation", f"{len(name)} bytes", limit)
    if len(access_key) != ACCESS_KEY_BYTES:
        raise EngineConfigError("access_key", f"{len(access_key)} bytes", ACCESS_KEY_BYTES)
    return _HELLO.pack(_MAGIC, _VERSION, access_key, len(name), name)


def decode_hello(raw: bytes) -> Hello | None:
    """Return what was said; None for anything that is not a hello."""
    magic, version, access_key, name_length, name = _HELLO.unpack(raw)
    if magic != _MAGIC or not 1 <= name_length <= MAX_INCARNATION_BYTES:
        return None
    try:
        incarnation = name[:name_length].decode()
    except UnicodeDecodeError:
        return None
    return Hello(version=version, access_key=access_key, incarnation=incarnation)


def encode_answer(answer: Answer, size_bytes: int) -> bytes:
    """Return the bytes of an answer."""
    return _ANSWER.pack(_MAGIC, answer, size_bytes)


def decode_answer(raw: bytes) -> tuple[Answer, int]:
    """Return the answer and the size of the memory.

    Raises:
        PeerRefusedError: It is no answer.
    """
    magic, number, size_bytes = _ANSWER.unpack(raw)
    if magic != _MAGIC or number not in Answer.__members__.values():
        raise PeerRefusedError("the target gave no proper answer")
    return Answer(number), size_bytes
