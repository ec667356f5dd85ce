"""`tandem prefill` and `tandem decode`: one service in this process.

Their flags are the keys of serving_core.config, so they are parsed there, `--help` included.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import typer

SERVICE_CONTEXT: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
}
_HELP_FLAGS = {"-h", "--help"}


def prefill(context: typer.Context) -> None:
    """Run a prefill service in this process; `tandem prefill --help` lists its flags."""
    arguments = list(context.args)
    if _HELP_FLAGS & set(arguments):
        from serving_core.config import load_prefill_config

        load_prefill_config(arguments)  # Prints the help and exits.
    _become("prefill_service", arguments)


def decode(context: typer.Context) -> None:
    """Run a decode service in this process; `tandem decode --help` lists its flags."""
    arguments = list(context.args)
    if _HELP_FLAGS & set(arguments):
        from serving_core.config import load_decode_config

        load_decode_config(arguments)  # Prints the help and exits.
    _become("decode_service", arguments)


def _become(module: str, arguments: list[str]) -> None:
    """Do what `python -m MODULE ARGUMENT...` does; ends with SystemExit."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
