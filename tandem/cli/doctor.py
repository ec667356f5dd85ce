"""`tandem doctor`: what this machine has of what Tandem needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: ok, findings.")
    ] = False,
) -> None:
    """Check this machine. Exit status 1 when something needed is missing."""
    from tandem.doctor import Level, examine

    findings = examine()
    is_ok = all(finding.level is not Level.MISSING for finding in findings)
    if as_json:
        print(json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}))
        raise typer.Exit(0 if is_ok else 1)
    colours = {Level.OK: "green", Level.NOTE: "yellow", Level.MISSING: "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        level = f"[{colours[finding.level]}]{finding.level.value}[/]"
        text = finding.value if not finding.advice else f"{finding.value} ({finding.advice})"
        table.add_row(level, escape(finding.name), escape(text))
    console = Console(highlight=False)
    console.print(table)
    console.print("ready" if is_ok else "[red]something needed is missing[/red]")
    raise typer.Exit(0 if is_ok else 1)
