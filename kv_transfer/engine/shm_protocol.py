"""What a writer and a shared-memory target say to each other, once, over a Unix socket.

    writer ──hello (fixed size)──▶ target
    writer ◀──answer, with the memory's descriptor when accepted── target

Then both keep the connection open and say nothing; its end tells that the other side let go. A
target gives no answer to who does not know the access key.
"""

import os
import re
import socket
import stat
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from kv_transfer.errors import EngineConfigError, PeerRefusedError

ACCESS_KEY_BYTES = 32
MAX_INCARNATION_BYTES = 64
_MAGIC = b"TandemKV"
_VERSION = 1
_HELLO = struct.Struct(f"<8sI{ACCESS_KEY_BYTES}sB{MAX_INCARNATION_BYTES}s")
_ANSWER = struct.Struct("<8sIQ")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = _ANSWER.size
SOCKET_NAME = re.compile(r"kv-[0-9a-f]{32}\.sock")
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, without its NUL
_LONGEST_NAME = "new-" + "0" * 32 + ".sock"


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


def check_socket_dir(socket_dir: Path) -> Path:
    """Make the directory if it is not there, and return its real path.

    Raises:
        EngineConfigError: It is not a directory of this user that nobody else may enter, or its
            path is too long for a socket.
    """
    try:
        socket_dir.mkdir(mode=0o700, exist_ok=True)
        real = socket_dir.resolve(strict=True)
        status = real.stat()
    except OSError as error:
        raise EngineConfigError("socket_dir", f"{socket_dir} ({error})", "a directory") from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        raise EngineConfigError("socket_dir", f"of user {status.st_uid}", os.geteuid())
    if mode != 0o700:
        raise EngineConfigError("socket_dir", f"of mode {mode:04o}", "0700")
    num_bytes = len(os.fsencode(real / _LONGEST_NAME))
    if num_bytes > _MAX_SOCKET_PATH_BYTES:
        limit = f"socket paths <= {_MAX_SOCKET_PATH_BYTES} bytes"
        raise EngineConfigError("socket_dir", f"{num_bytes} bytes with a socket's name", limit)
    return real


def check_socket_path(address: str, socket_dir: Path) -> Path:
    """Return the path of a target's socket, which a peer named.

    Raises:
        EngineConfigError: It is not a socket's name right inside the directory.
        PeerRefusedError: It is there and is not a socket of this user.
    """
    path = Path(address)
    if path.parent != socket_dir or SOCKET_NAME.fullmatch(path.name) is None:
        raise EngineConfigError("descriptor.address", address, f"a socket in {socket_dir}")
    try:
        status = path.lstat()
    except FileNotFoundError:
        return path  # connect says so
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise PeerRefusedError(f"{address} is not a socket of this user")
    return path


def listen(socket_dir: Path, token: str, backlog: int) -> tuple[socket.socket, Path]:
    """Return a listening socket of mode 0600 and its path.

    It gets its final name only when it listens, so `remove_stale_sockets` of another process never
    takes it for a dead one.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    early, final = socket_dir / f"new-{token}.sock", socket_dir / f"kv-{token}.sock"
    try:
        listener.bind(os.fspath(early))
        early.chmod(0o600)
        listener.listen(backlog)
        early.rename(final)
    except BaseException:
        listener.close()
        early.unlink(missing_ok=True)
        raise
    return listener, final


def remove_stale_sockets(socket_dir: Path) -> None:
    """Remove the sockets of processes that ended without closing their targets."""
    for path in socket_dir.iterdir():
        if SOCKET_NAME.fullmatch(path.name) is None:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # busy, or just removed: not ours to judge
