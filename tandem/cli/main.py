"""The `tandem` command."""

from __future__ import annotations

import typer

from tandem.cli.doctor import doctor
from tandem.cli.generate import generate
from tandem.cli.service import SERVICE_CONTEXT, decode, prefill
from tandem.cli.up import up

app = typer.Typer(
    name="tandem",
    help="Serve large language models with prefill and decode as separate services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(up)
app.command(context_settings=SERVICE_CONTEXT, add_help_option=False)(prefill)
app.command(context_settings=SERVICE_CONTEXT, add_help_option=False)(decode)
app.command()(generate)
app.command()(doctor)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
