"""The compared ways of moving blocks, and what sender and receiver must know of each other."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from kv_transfer.engine.base import TargetDescriptor

HOST = "127.0.0.1"
MAX_ORDER_BYTES = 1 << 16


class Method(StrEnum):
    """By the names used in the report."""

    MEMCPY = "memcpy"
    SHM_NO_DIGEST = "shm_no_digest"
    SHM = "shm"
    TCP = "tcp"
    MOONCAKE_NAIVE = "mooncake_naive"
    MOONCAKE_NO_DIGEST = "mooncake_no_digest"
    MOONCAKE = "mooncake"


def has_mooncake() -> bool:
    """Whether the package is installed."""
    return find_spec("mooncake") is not None


def usable_methods() -> list[Method]:
    """Return the methods that this machine can run."""
    return [one for one in Method if has_mooncake() or not one.startswith("mooncake")]


class NullDigest:
    """Stands in for a digest where its cost is to be left out."""

    def update(self, data: memoryview, /) -> None:
        """Take nothing."""

    def intdigest(self) -> int:
        """Return nothing."""
        return 0


def descriptor_to_json(descriptor: TargetDescriptor) -> dict[str, Any]:
    """Return a descriptor as JSON values."""
    return {
        "engine": descriptor.engine,
        "address": descriptor.address,
        "access_key": descriptor.access_key.hex(),
        "size_bytes": descriptor.size_bytes,
    }


def descriptor_from_json(fields: dict[str, Any]) -> TargetDescriptor:
    """Return the descriptor that `descriptor_to_json` was given."""
    return TargetDescriptor(**(fields | {"access_key": bytes.fromhex(fields["access_key"])}))
