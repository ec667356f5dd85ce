"""Follows the file of prefill services while the process runs. Event loop thread only.

The file is read once a second, whole: that notices an edit in place and a replacement by rename
alike, also on file systems whose times are coarse. What is wrong, gone or half written changes
nothing: the peers stay, the problem is logged once, and a gauge shows it until it is over.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serving_core.errors import ConfigError
from serving_core.peer_addresses import KEY, read_peers_file

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0


class PeersFile:
    """The file and what it said last."""

    def __init__(
        self,
        path: Path,
        *,
        on_addresses: Callable[[tuple[str, ...]], None],
        on_invalid: Callable[[bool], None],
        poll_interval_s: float = _POLL_INTERVAL_S,
    ) -> None:
        """Read nothing yet.

        Args:
            path: The file.
            on_addresses: Told the addresses, at first and whenever they have changed. What it
                cannot take is a ConfigError, and is told again at the next look.
            on_invalid: Told after each look whether the file is wrong.
            poll_interval_s: Time between two looks.
        """
        self._path = path
        self._on_addresses = on_addresses
        self._on_invalid = on_invalid
        self._poll_interval_s = poll_interval_s
        self._addresses: tuple[str, ...] = ()
        self._problem = ""

    async def start(self) -> None:
        """Read it for the first time; a file that says nothing names no peers.

        Raises:
            ConfigError: It is wrong.
        """
        self._addresses = await self._read() or ()
        self._on_addresses(self._addresses)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(self._poll_interval_s)
            await self.look()

    async def look(self) -> None:
        """Read the file and tell what has changed."""
        try:
            addresses = await self._read()
            if addresses is None and self._addresses:
                raise ConfigError([f"{self._path}: is empty; no peers at all is `{KEY} = []`"])
            if addresses is not None and addresses != self._addresses:
                self._on_addresses(addresses)
                self._addresses = addresses
                logger.info("%s names %d prefill services", self._path, len(addresses))
        except ConfigError as error:
            self._note(str(error))
        else:
            self._note("")

    async def _read(self) -> tuple[str, ...] | None:
        # On a thread: the file may lie on a file system that hangs.
        read: Callable[[], tuple[str, ...] | None] = partial(read_peers_file, self._path)
        return await asyncio.to_thread(read)

    def _note(self, problem: str) -> None:
        """Log a problem once, however often it is met in a row."""
        if problem and problem != self._problem:
            logger.error("the prefill services stay as they are: %s", problem)
        self._problem = problem
        self._on_invalid(bool(problem))
