"""`tandem up`: prefill and decode services and the router on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from tandem.launcher import Launcher, RunningServices

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of a checkpoint. Default: the small model of this package."),
    ] = None,
    decode_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the first decode service; further ones count up. 0 takes free ports.",
        ),
    ] = 0,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill services.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode services.")] = 1,
    router: Annotated[
        bool,
        typer.Option(help="Start the smg router, which serves the OpenAI HTTP API."),
    ] = True,
    router_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the OpenAI HTTP API. 0 takes a free one."),
    ] = 0,
    kv_engine: Annotated[str, typer.Option(help="How KV moves between the services.")] = "shm",
    num_threads: Annotated[
        int, typer.Option(min=0, help="Threads of each service. 0 divides the cores among them.")
    ] = 0,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file for all services; docs/configuration.md lists the keys."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory for one log file per service.")
    ] = None,
    ready_timeout_s: Annotated[
        float, typer.Option(min=1, help="Longest wait until everything serves, in seconds.")
    ] = 120.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the services' logs to stderr.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the addresses as one line of JSON.")
    ] = False,
) -> None:
    """Start prefill, decode and the router here, wait until they serve, and run until Ctrl-C.

    Prints the addresses when everything is ready. Everything is stopped on Ctrl-C or SIGTERM
    (exit status 0), or when one service dies (exit status 1).
    """
    from tandem.default_model import default_model_dir
    from tandem.launcher import Launcher, LauncherError, LauncherStoppedError, LaunchSettings

    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    settings = LaunchSettings(
        model_dir=default_model_dir() if model is None else model,
        num_prefill=prefill,
        num_decode=decode,
        decode_port=decode_port,
        router=router,
        router_port=router_port,
        kv_engine=kv_engine,
        num_threads=num_threads,
        service_arguments=() if config is None else (f"--config={config}",),
        ready_timeout_s=ready_timeout_s,
        log_dir=log_dir,
    )
    errors = Console(stderr=True, highlight=False)
    started_at = monotonic()
    with Launcher(settings, on_log_line=_print_log_line if verbose else None) as launcher:
        _stop_on_signals(launcher)
        try:
            services = launcher.start()
            _print_ready(services, seconds=monotonic() - started_at, as_json=as_json)
            cause = launcher.wait()
        except LauncherStoppedError as stopped:
            cause = str(stopped)
        except LauncherError as error:
            errors.print(f"[red]tandem up:[/red] {escape(str(error))}")
            raise typer.Exit(1) from error
        errors.print(f"tandem up: {cause}, stopping")


def _stop_on_signals(launcher: Launcher) -> None:
    """Signals end the launcher's wait; a second one changes nothing, stopping is bounded."""
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda received, _: launcher.request_stop(_name(received)))


def _name(number: int) -> str:
    return signal.Signals(number).name


def _print_ready(services: RunningServices, *, seconds: float, as_json: bool) -> None:
    if as_json:
        line = {
            "event": "ready",
            "decode": services.decode,
            "prefill": services.prefill,
            "router": services.router,
            "pid": os.getpid(),
            "seconds": round(seconds, 3),
        }
        print(json.dumps(line), flush=True)
        return
    console = Console(highlight=False)
    console.print(f"ready in {seconds:.1f} s")
    for address in services.prefill:
        console.print(f"  prefill  {address}")
    for address in services.decode:
        console.print(f"  decode   [bold]{address}[/bold]")
    if services.router:
        console.print(f"  router   [bold]http://{services.router}/v1[/bold]")
    console.print(f"ask: tandem generate --address {services.decode[0]} --prompt TEXT")
    console.print("stop: Ctrl-C")
    sys.stdout.flush()


def _print_log_line(service: str, line: str) -> None:
    print(f"{service} | {line}", file=sys.stderr, flush=True)
