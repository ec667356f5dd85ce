"""Addresses of prefill services, in the configuration and in a file of their own.

The file is TOML with one key, the same as in the configuration:

    prefill-address = ["10.0.0.1:50061", "10.0.0.2:50061"]

A list that was cut off in the middle of a write is no TOML, so a half-written file cannot be taken
for a shorter list.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path

from serving_core.errors import ConfigError, shorten

KEY = "prefill-address"
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PORT = re.compile(r"[0-9]{1,5}")


def is_host_port(address: str) -> bool:
    """Whether a text is host:port, with IPv6 addresses in brackets.

    Nothing else gets through: gRPC would take `unix:/path` and `dns:///name` for targets too.
    """
    host, _, port = address.rpartition(":")
    if not (_PORT.fullmatch(port) and 0 < int(port) <= 65535):
        return False
    if host.startswith("[") and host.endswith("]"):
        try:
            return ipaddress.ip_address(host[1:-1]).version == 6
        except ValueError:
            return False
    return _NAME.fullmatch(host) is not None


def read_peers_file(path: Path) -> tuple[str, ...] | None:
    """Return the addresses in the file, each once and in its order; None if it says nothing.

    Args:
        path: The file. It says nothing when it is empty but for comments and blank lines, which is
            what a writer that truncates it shows for a moment.

    Raises:
        ConfigError: It cannot be read or is wrong; names file, line and value.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError([f"{path}: must have at most {_MAX_FILE_BYTES} bytes"])
    try:
        text = content.decode("utf-8")
        entries = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from error
    if not entries:
        return None
    problems = [
        f"{path}: {name} is an unknown key, the only one is {KEY}"
        for name in entries
        if name != KEY
    ]
    addresses = entries.get(KEY, [])
    if not isinstance(addresses, list):
        problems.append(f"{path}: {KEY} = {shorten(addresses)!r}: must be a list of host:port")
        addresses = []
    problems.extend(
        f"{path}:{_line_of(text, address)}: {KEY} = {shorten(address)!r}: must be host:port"
        for address in addresses
        if not (isinstance(address, str) and is_host_port(address))
    )
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(addresses))


def _line_of(text: str, value: object) -> int:
    """Return the first line, from 1, on which the value stands; 1 if it is spelled otherwise."""
    spellings = (f'"{value}"', f"'{value}'") if isinstance(value, str) else (str(value),)
    for number, line in enumerate(text.splitlines(), start=1):
        if any(spelling in line for spelling in spellings):
            return number
    return 1
