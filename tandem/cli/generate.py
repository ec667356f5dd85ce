"""`tandem generate`: one request to a decode service."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from tandem.client import Client
    from tandem.errors import ClientError
    from tandem.generation import Completion, Prompt, SamplingOptions

_INTERRUPTED_STATUS = 130


def generate(
    *,
    address: Annotated[str, typer.Option(help="host:port of a decode service.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    token_ids: Annotated[
        Path | None,
        typer.Option(help="JSON file with a list of token ids to continue; - reads stdin."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Fail unless a model of this name is served. Default: any.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: what the service allows.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this probability.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K likeliest tokens; 0 is all.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling; equal seeds give equal answers.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Tokens before which the answer may not end.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; repeat for more.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends the answer; repeat for more.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after an end-of-text token.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Time limit of the request, in seconds.")
    ] = 600.0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: token_ids, text, finish_reason, usage, timings.",
        ),
    ] = False,
) -> None:
    """Continue a prompt: stream the answer, then its timings.

    Exit status 1 and a message on stderr when the request fails (with --json, a JSON object).
    """
    from tandem.client import Client
    from tandem.errors import ClientError

    text_or_ids = _read_prompt(prompt, token_ids)
    optional: dict[str, object] = {
        "max_tokens": max_tokens,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "min_tokens": min_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_id,
    }
    sampling: SamplingOptions = {"temperature": temperature, "ignore_eos": ignore_eos}
    sampling.update({name: value for name, value in optional.items() if value is not None})  # type: ignore[typeddict-item]  # the names are the keys
    try:
        with Client(address, timeout_s=timeout_s, model=model) as client:
            completion = _run(client, text_or_ids, sampling, shows_text=not as_json)
    except ClientError as error:
        _print_error(error, as_json=as_json)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED_STATUS) from None
    if as_json:
        print(json.dumps(asdict(completion)))
    else:
        _print_timings(completion)


def _read_prompt(prompt: str | None, token_ids: Path | None) -> Prompt:
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give one of --prompt and --token-ids")
    if token_ids is None:
        assert prompt is not None
        return prompt
    try:
        text = sys.stdin.read() if str(token_ids) == "-" else token_ids.read_text(encoding="utf-8")
        ids = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise typer.BadParameter(f"--token-ids {token_ids}: {error}") from error
    # bool is an int to Python, but not a token id.
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise typer.BadParameter(f"--token-ids {token_ids}: must hold a JSON list of integers")
    return ids


def _run(
    client: Client, prompt: Prompt, sampling: SamplingOptions, *, shows_text: bool
) -> Completion:
    """Generates; prints pieces as they come, token ids where the model has no tokenizer."""
    with client.generate(prompt, **sampling) as generation:
        has_text = client.tokenizer() is not None
        for piece in generation:
            if shows_text:
                shown = piece.text if has_text else " ".join(map(str, (*piece.token_ids, "")))
                print(shown, end="", flush=True)
        if shows_text:
            print(flush=True)
        return generation.completion


def _print_timings(completion: Completion) -> None:
    timings, usage = completion.timings, completion.usage
    pushed = timings.num_pushed_bytes
    rows = {
        "TTFT": _milliseconds(timings.ttft_s),
        "TPOT": _milliseconds(timings.tpot_s),
        "bytes pushed": "not reported" if pushed is None else f"{pushed:,}",
        "exposed transfer": _milliseconds(timings.exposed_transfer_s),
        "tokens": f"{usage.prompt_tokens} prompt, {usage.completion_tokens} generated",
        "finish reason": completion.finish_reason,
    }
    console = Console(highlight=False)
    for name, value in rows.items():
        console.print(f"[dim]{name:<17}[/dim] {value}")


def _milliseconds(seconds: float | None) -> str:
    return "not reported" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _print_error(error: ClientError, *, as_json: bool) -> None:
    if not as_json:
        message = f"[red]tandem generate:[/red] {escape(str(error))}"
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        return
    details = {
        "status": error.status.name,
        "message": error.message,
        "retryable": error.retryable,
        **asdict(error.details),
    }
    print(json.dumps({"error": details}), file=sys.stderr)
