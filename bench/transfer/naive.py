"""The bare Mooncake package, used as its manual shows: register memory, write a batch of blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kv_transfer.engine.mooncake_child import confine_to_loopback

# Pooled connections are the faster of its modes. Without the second setting a host with an RDMA
# device would use it.
_SETTINGS = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class NaiveError(Exception):
    """The package reports a failure."""


class NaiveEngine:
    """One engine of the package in this process."""

    def __init__(self, host: str) -> None:
        """Start it; its ports, which ask for no key, take loopback peers only.

        Raises:
            NaiveError: It does not start.
        """
        os.environ.update(_SETTINGS)
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise NaiveError("the engine does not start")
        confine_to_loopback()
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def close(self) -> None:
        """End it; until then whoever made it must hold on to it."""
        self._engine = None

    def register(self, address: int, num_bytes: int) -> None:
        """Let memory be read or written by transfers.

        Raises:
            NaiveError: It is refused.
        """
        if (status := self._engine.register_memory(address, num_bytes)) != 0:
            raise NaiveError(f"memory is refused: status {status}")

    def write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Write a batch of blocks and wait until all of it has landed.

        Raises:
            NaiveError: It did not.
        """
        status = self._engine.batch_transfer_sync_write(session, sources, targets, sizes)
        if status != 0:
            raise NaiveError(f"a batch failed: status {status}")
