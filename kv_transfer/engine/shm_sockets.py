"""The Unix sockets at which targets of shared memory are reached: where they lie, and whose.

A directory of mode 0700 holds one socket per target. Their names are checked, because a peer
names them.
"""

import os
import re
import socket
import stat
from pathlib import Path

from kv_transfer.errors import EngineConfigError, PeerRefusedError

SOCKET_NAME = re.compile(r"kv-[0-9a-f]{32}\.sock")
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, without its NUL
_LONGEST_NAME = "new-" + "0" * 32 + ".sock"


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
