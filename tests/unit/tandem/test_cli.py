"""The command line: complete help, light start, stable JSON, clear failures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import typer.main
from typer.testing import CliRunner

from serving_core.config import Role, flag_names
from serving_core.errors import InvalidRequestError
from serving_core.rpc.status import to_rpc_status
from serving_core.tokenizer import Tokenizer
from tandem import default_model_dir
from tandem.cli.main import app
from tests.support.fake_engine import FakeEngine, Responses, answer, chunk, complete, serving

COMMANDS = ("up", "prefill", "decode", "generate", "doctor")
STABLE_FLAGS = {
    "up": {"--model", "--decode-port", "--prefill", "--decode", "--kv-engine", "--json"},
    "generate": {"--address", "--prompt", "--token-ids", "--max-tokens", "--json"},
}
# Wide enough that no flag is cut in the help.
RUNNER = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer_zip=Tokenizer.from_dir(default_model_dir()).files_zip())


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


def test_help_lists_every_command() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout


def test_every_option_of_every_command_has_help() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    assert set(commands) == set(COMMANDS)
    for name, command in commands.items():
        assert command.help, name
        missing = [option.name for option in command.params if not getattr(option, "help", "")]
        assert missing == [], name


@pytest.mark.parametrize("command", sorted(STABLE_FLAGS))
def test_flags_that_scripts_rely_on_are_there(command: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    flags = {flag for option in commands[command].params for flag in option.opts}
    assert flags >= STABLE_FLAGS[command]


@pytest.mark.parametrize("role", list(Role))
def test_service_help_lists_every_key_of_the_configuration(role: Role) -> None:
    result = RUNNER.invoke(app, [role.value, "--help"])
    assert result.exit_code == 0
    for flag in (*flag_names(role), "--config"):
        assert f"  {flag}" in result.stdout, flag


LIGHT_START = """
import sys
from tandem.cli.main import main
sys.argv = ["tandem", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert stop.code == 0, stop.code
heavy = {"torch", "transformers", "grpc"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_loads_nothing_heavy(command: str | None) -> None:
    """Help must answer at once; torch alone takes over a second."""
    arguments = ["--help"] if command is None else [command, "--help"]
    subprocess.run([sys.executable, "-c", LIGHT_START, *arguments], check=True, timeout=30)


def test_generate_json_has_the_stable_shape(engine: FakeEngine, address: str) -> None:
    engine.script = answer(chunk(139), chunk(140), complete(2))
    result = RUNNER.invoke(
        app, ["generate", "--address", address, "--prompt", "hi", "--max-tokens", "2", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    output = json.loads(result.stdout)
    assert set(output) == {"token_ids", "text", "finish_reason", "usage", "timings"}
    assert output["token_ids"] == [139, 140]
    assert output["text"].split() == ["river", "stone"]
    assert output["finish_reason"] == "length"
    assert output["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 2}
    assert set(output["timings"]) == {
        "ttft_s",
        "tpot_s",
        "total_s",
        "prefill_queue_s",
        "prefill_compute_s",
        "exposed_transfer_s",
        "num_pushed_bytes",
    }
    assert output["timings"]["num_pushed_bytes"] == 4096
    assert engine.requests[0].text == "hi"
    assert engine.requests[0].sampling_params.max_tokens == 2
    assert engine.requests[0].sampling_params.temperature == 0.0


def test_generate_streams_text_then_the_timings(engine: FakeEngine, address: str) -> None:
    engine.script = answer(chunk(139), chunk(140), complete(2))
    result = RUNNER.invoke(app, ["generate", "--address", address, "--prompt", "is"])
    assert result.exit_code == 0, result.stderr
    text, *rows = result.stdout.splitlines()
    assert text == " river stone"
    shown = {row[:17].strip(): row[17:].strip() for row in rows}
    assert shown["bytes pushed"] == "4,096"
    assert shown["exposed transfer"] == "125.00 ms"
    assert shown["TTFT"].endswith(" ms")
    assert shown["TPOT"].endswith(" ms")


def test_generate_model_without_tokenizer_prints_ids(engine: FakeEngine, address: str) -> None:
    engine.tokenizer_zip = None
    engine.script = answer(chunk(139), chunk(140, 141), complete(3))
    result = RUNNER.invoke(app, ["generate", "--address", address, "--prompt", "x"])
    assert result.stdout.splitlines()[0].split() == ["139", "140", "141"]


def test_generate_token_ids_come_from_the_file(
    engine: FakeEngine, address: str, tmp_path: Path
) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[5, 6, 7]")
    result = RUNNER.invoke(
        app, ["generate", "--address", address, "--token-ids", str(file), "--json"]
    )
    assert result.exit_code == 0, result.stderr
    piped = ["generate", "--address", address, "--token-ids", "-", "--json"]
    assert RUNNER.invoke(app, piped, input="[8]").exit_code == 0
    assert [list(request.tokenized.input_ids) for request in engine.requests] == [[5, 6, 7], [8]]


@pytest.mark.parametrize("content", ["{", '"text"', "[1, 2.5]", "[true]", '["1"]'])
def test_generate_bad_token_id_file_is_a_usage_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(content)
    result = RUNNER.invoke(app, ["generate", "--address", "x:1", "--token-ids", str(file)])
    assert result.exit_code == 2
    assert "ids.json" in result.stderr.replace("\n", "")


@pytest.mark.parametrize("arguments", [[], ["--prompt", "x", "--token-ids", "f"]])
def test_generate_needs_exactly_one_prompt(arguments: list[str]) -> None:
    result = RUNNER.invoke(app, ["generate", "--address", "x:1", *arguments])
    assert result.exit_code == 2
    assert "--prompt and --token-ids" in result.stderr


def refuse(_: object, context: grpc.ServicerContext) -> Responses:
    """The service finds a field wrong."""
    context.abort_with_status(to_rpc_status(InvalidRequestError("top_p", 3.0, "at most 1")))
    yield from ()


def test_generate_refused_fails_with_the_reason(engine: FakeEngine, address: str) -> None:
    engine.script = refuse
    arguments = ["generate", "--address", address, "--prompt", "x", "--top-p", "3"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert message == "tandem generate: INVALID_ARGUMENT: top_p = 3.0: must be at most 1"
    as_json = RUNNER.invoke(app, [*arguments, "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stderr)["error"] == {
        "status": "INVALID_ARGUMENT",
        "message": "top_p = 3.0: must be at most 1",
        "retryable": False,
        "reason": "INVALID_REQUEST",
        "field": "top_p",
        "value": "3.0",
        "limit": "at most 1",
        "retry_after_s": None,
    }


def test_up_service_cannot_start_says_which_and_why(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["up", "--model", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert "prefill-0 ended with exit status" in result.stderr
    assert "absent" in result.stderr


def test_doctor_json_lists_findings() -> None:
    result = RUNNER.invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report
    assert report["ok"]
    names = {finding["name"] for finding in report["findings"]}
    assert names >= {"python", "torch", "cpu", "memory", "memfd", "pidfd", "socket dir", "mooncake"}


def test_doctor_prints_each_finding() -> None:
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "pidfd" in result.stdout
    assert result.stdout.rstrip().endswith("ready")
