"""Runs one service as a process: logging, the ready line, signals, the exit code.

0   stopped by SIGTERM or SIGINT
1   a fault of the service itself, e.g. its compute thread died
2   it could not start; the reason is on stderr
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

from serving_core.errors import StartupError
from serving_core.telemetry import set_up_logging

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_NOT_STARTED = 2


class ServiceApp(Protocol):
    """A built service."""

    @property
    def address(self) -> str:
        """host:port on which it serves; after `start`."""

    async def start(self) -> None:
        """Serve."""

    async def wait(self) -> None:
        """Return after `stop`; raise when the service cannot go on."""

    async def stop(self) -> None:
        """Refuse new requests, let running ones end within the grace time, and end."""


def run_service(role: str, *, log_level: str, build: Callable[[], ServiceApp]) -> int:
    """Build and run a service until a signal or a fault; returns the exit code."""
    set_up_logging(log_level)
    try:
        app = build()
        return asyncio.run(_serve(role, app))
    except StartupError as error:
        logger.error("%s service cannot start: %s", role, error)
        return EXIT_NOT_STARTED


async def _serve(role: str, app: ServiceApp) -> int:
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_asked.set)
    await app.start()
    ready = {"event": "ready", "role": role, "address": app.address, "pid": os.getpid()}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    logger.info("%s service ready address=%s", role, app.address)
    asked = asyncio.create_task(stop_asked.wait())
    ended = asyncio.create_task(app.wait())
    await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    logger.info("%s service stops", role)
    await app.stop()
    fault = (await asyncio.gather(ended, return_exceptions=True))[0]
    if isinstance(fault, BaseException):
        logger.critical("%s service could not go on", role, exc_info=fault)
        return EXIT_FAULT
    return EXIT_OK
