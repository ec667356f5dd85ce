"""`python -m decode_service`: the decode service as a process.

Prints one JSON line when it is ready; logs go to stderr. SIGTERM and SIGINT let running requests
finish within the grace; the exit status is then 0.
"""

import asyncio
import json
import logging
import os
import signal
import sys

import torch

from decode_service.app import App, build
from kv_transfer.errors import KvTransferError
from serving_core.config import load_decode_config
from serving_core.errors import ComputeError, StartupError
from serving_core.telemetry import set_up_logging

logger = logging.getLogger(__name__)


async def _serve(app: App) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await app.start()
    ready = {"event": "ready", "role": "decode", "address": app.address, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)  # the one line that stdout is for
    waiting = asyncio.create_task(app.wait())
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait((waiting, signalled), return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    await app.stop()
    await waiting


def main() -> int:
    """Run the service; returns the exit status."""
    try:
        config = load_decode_config(sys.argv[1:])
        set_up_logging(config.log_level)
        torch.set_num_threads(config.num_threads)
        app = build(config)
        asyncio.run(_serve(app))
    except (StartupError, KvTransferError) as error:
        print(f"decode_service: {error}", file=sys.stderr)
        return 2
    except ComputeError as error:
        logger.critical("exiting: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
