"""Every file in deploy/ can be used as it stands: keys, flags, commands and ports agree."""

from __future__ import annotations

import configparser
import shlex
import tomllib
from pathlib import Path

import pytest
from smg.launch_router import parse_router_args

from serving_core.config import DecodeConfig, Role, load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def load(role: Role, model: Path) -> object:
    """The role's configuration from deploy/tandem.toml, with a model that exists here."""
    return load_config(role, DEPLOY / "tandem.toml", {"model": str(model)}, {})


def command(unit: Path) -> list[str]:
    """The words of a unit's ExecStart."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    parser.read(unit)
    assert {"Unit", "Service", "Install"} <= set(parser.sections())
    return shlex.split(parser["Service"]["ExecStart"])


def test_decode_knows_where_prefill_listens(tmp_path: Path) -> None:
    prefill, decode = load(Role.PREFILL, tmp_path), load(Role.DECODE, tmp_path)
    assert isinstance(decode, DecodeConfig)
    assert decode.prefill_address == (f"127.0.0.1:{prefill.port}",)  # type: ignore[attr-defined]
    assert decode.block_size == prefill.block_size  # type: ignore[attr-defined]
    assert decode.kv_socket_dir == prefill.kv_socket_dir  # type: ignore[attr-defined]


def test_there_is_a_unit_for_each_role_and_the_router() -> None:
    assert [unit.stem for unit in UNITS] == ["tandem-decode", "tandem-prefill", "tandem-router"]


@pytest.mark.parametrize("role", list(Role))
def test_unit_of_a_service_runs_the_command_with_the_file(role: Role) -> None:
    words = command(DEPLOY / "systemd" / f"tandem-{role.value}.service")
    assert words[0].endswith("/bin/tandem")
    assert words[1:] == [role.value, "--config=/etc/tandem/tandem.toml"]


def test_unit_of_the_router_has_flags_that_the_router_takes() -> None:
    words = command(DEPLOY / "systemd" / "tandem-router.service")
    assert words[1:3] == ["-m", "smg.launch_router"]
    arguments = parse_router_args(words[3:])
    decode = tomllib.loads((DEPLOY / "tandem.toml").read_text())["decode"]
    assert arguments.worker_urls == [f"grpc://127.0.0.1:{decode['port']}"]
    assert arguments.host == "127.0.0.1"
