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
from typing import Protocol, TypeVar

from kv_transfer.errors import KvTransferError
from serving_core.config import ServiceConfig
from serving_core.errors import ConfigError, StartupError
from serving_core.telemetry import set_up_logging

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_NOT_STARTED = 2


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


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


def run_service(
    role: str, *, load: Callable[[], ConfigT], build: Callable[[ConfigT], ServiceApp]
) -> int:
    """Configure, build and run a service until a signal or a fault.

    Args:
        role: Name of the service, for the ready line and for people.
        load: Reads the configuration.
        build: Makes the service; blocks while the model loads.

    Returns:
        The exit code of the process.
    """
    try:
        config = load()
        set_up_logging(config.log_level)
        return asyncio.run(_serve(role, build(config)))
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"{role}: {problem}\n")
    except (StartupError, KvTransferError) as error:
        sys.stderr.write(f"{role}: cannot start: {error}\n")
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
