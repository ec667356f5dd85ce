"""Reads the configuration: defaults, then TOML, then TANDEM_* environment, then flags.

This is the only module that reads the environment or the command line. All problems are reported
at once, and a key that nobody knows is one of them.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from serving_core.config_keys import (
    KEY,
    DecodeConfig,
    KeyInfo,
    PrefillConfig,
    ServiceConfig,
)
from serving_core.errors import ConfigError
from serving_core.peer_addresses import is_host_port, read_peers_file

__all__ = [
    "DecodeConfig",
    "PrefillConfig",
    "Role",
    "ServiceConfig",
    "flag_names",
    "key_info",
    "load_config",
    "load_decode_config",
    "load_prefill_config",
    "render_reference",
]

ENV_PREFIX = "TANDEM_"
COMMON_TABLE = "common"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Role(StrEnum):
    """Which service a configuration is for."""

    PREFILL = "prefill"
    DECODE = "decode"


_CLASSES: Mapping[Role, type[ServiceConfig]] = {
    Role.PREFILL: PrefillConfig,
    Role.DECODE: DecodeConfig,
}


def key_info(role: Role) -> dict[str, tuple[KeyInfo, type, Any]]:
    """Return name -> (what the reference says, type, default) of every key of a role."""
    config_class = _CLASSES[role]
    hints = get_type_hints(config_class)
    return {
        item.name: (item.metadata[KEY], hints[item.name], _default(item))
        for item in fields(config_class)
    }


def flag_names(role: Role) -> list[str]:
    """Return the flags of a role, e.g. `--block-size`, in the order of the reference."""
    return [f"--{_dashed(name)}" for name in key_info(role)]


def _default(item: Field[Any]) -> Any:
    assert item.default is not MISSING, f"key {item.name} has no default"
    return item.default


def load_prefill_config(argv: Sequence[str]) -> PrefillConfig:
    """Read the prefill service's configuration for a command line; see `load_config`."""
    config = _load_from_argv(Role.PREFILL, argv)
    assert isinstance(config, PrefillConfig)
    return config


def load_decode_config(argv: Sequence[str]) -> DecodeConfig:
    """Read the decode service's configuration for a command line; see `load_config`."""
    config = _load_from_argv(Role.DECODE, argv)
    assert isinstance(config, DecodeConfig)
    return config


def _load_from_argv(role: Role, argv: Sequence[str]) -> ServiceConfig:
    parser = _argument_parser(role)
    flags = dict(vars(parser.parse_args(argv)))
    config_path = flags.pop("config")
    given = {name: value for name, value in flags.items() if value is not None}
    return load_config(role, Path(config_path) if config_path else None, given, dict(os.environ))


def _argument_parser(role: Role) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{role.value}_service", description=f"The Tandem {role.value} service."
    )
    parser.add_argument("--config", help="TOML file; flags and environment override it.")
    for name, (info, kind, default) in key_info(role).items():
        flag = f"--{_dashed(name)}"
        text = _help_text(info, default).replace("%", "%%")
        if kind is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, help=text, default=None
            )
        elif kind == tuple[str, ...]:
            parser.add_argument(flag, action="append", help=text, metavar="VALUE")
        else:
            parser.add_argument(flag, help=text, metavar="VALUE")
    return parser


def load_config(
    role: Role,
    toml_path: Path | None,
    overrides: Mapping[str, object],
    environ: Mapping[str, str],
) -> ServiceConfig:
    """Merge all sources and check the result.

    Args:
        role: Which service.
        toml_path: File with the tables [common], [prefill] and [decode]; None reads none.
        overrides: Values of flags by key name; text is converted.
        environ: Environment; names are TANDEM_ and the key in capitals.

    Returns:
        A `PrefillConfig` or a `DecodeConfig`, as the role says.

    Raises:
        ConfigError: Holds every problem that was found.
    """
    problems: list[str] = []
    raw: dict[str, object] = {}
    raw.update(_from_toml(role, toml_path, problems))
    raw.update(_from_environ(role, environ, problems))
    known = key_info(role)
    for name, value in overrides.items():
        if name not in known:
            problems.append(f"--{_dashed(name)}: unknown key")
        raw[name] = value
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            info, kind, _ = known[name]
            try:
                values[name] = _checked(_dashed(name), value, kind, info)
            except ValueError as error:
                problems.append(str(error))
    config = _CLASSES[role](**values)
    problems.extend(_cross_checks(config))
    if problems:
        raise ConfigError(problems)
    return _resolve(config)


def _from_toml(role: Role, path: Path | None, problems: list[str]) -> dict[str, object]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"config = {path}: {error}")
        return {}
    values: dict[str, object] = {}
    tables = (COMMON_TABLE, *Role)
    for table, entries in content.items():
        if table not in tables or not isinstance(entries, dict):
            problems.append(f"{path}: [{table}] is unknown, tables are {', '.join(tables)}")
            continue
        # [common] may hold keys of either role, so that one file serves both.
        roles = list(Role) if table == COMMON_TABLE else [Role(table)]
        allowed = {name for one in roles for name in key_info(one)}
        problems.extend(
            f"{path}: [{table}] {name} is an unknown key"
            for name in entries
            if _underscored(name) not in allowed
        )
    for table in (COMMON_TABLE, role.value):
        entries = content.get(table)
        if isinstance(entries, dict):
            values.update({_underscored(name): value for name, value in entries.items()})
    return values


def _from_environ(role: Role, environ: Mapping[str, str], problems: list[str]) -> dict[str, object]:
    everywhere = {name for one in Role for name in key_info(one)}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in everywhere:
            problems.append(f"{variable}: unknown key")
        elif name in key_info(role):
            kind = key_info(role)[name][1]
            values[name] = text.split(",") if kind == tuple[str, ...] else text
    return values


def _checked(name: str, value: object, kind: type, info: KeyInfo) -> Any:
    """Convert one value and check it against its limits; ValueError says what is wrong."""
    try:
        converted = _convert(value, kind)
    except (TypeError, ValueError):
        wanted = "a list of texts" if kind == tuple[str, ...] else kind.__name__
        raise ValueError(f"{name} = {value!r}: must be {wanted}") from None
    if info.choices and converted not in info.choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(info.choices)}")
    if info.minimum is not None and not converted >= info.minimum:
        raise ValueError(f"{name} = {value!r}: must be at least {info.minimum:g}")
    if info.maximum is not None and not converted <= info.maximum:
        raise ValueError(f"{name} = {value!r}: must be at most {info.maximum:g}")
    return converted


def _convert(value: object, kind: type) -> Any:
    if kind is bool:
        return _to_bool(value)
    if kind == tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise TypeError
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    if kind is int:
        if isinstance(value, float):
            raise TypeError
        return int(value)
    if kind is float:
        return float(value)
    if not isinstance(value, str):
        raise TypeError
    return value


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise TypeError


def _cross_checks(config: ServiceConfig) -> list[str]:
    problems: list[str] = []
    if not config.model:
        problems.append("model is not set: must be the directory of a checkpoint")
    elif not Path(config.model).is_dir():
        problems.append(f"model = {config.model}: must be a directory that exists")
    if bool(config.tls_cert) != bool(config.tls_key):
        problems.append("tls-cert and tls-key: must be set together")
    if not (is_loopback(config.host) or config.tls_cert or config.insecure):
        problems.append(
            f"host = {config.host}: must be a loopback address unless TLS or --insecure is set"
        )
    if config.kv_engine == "mooncake" and not (
        is_loopback(config.kv_host) or config.insecure_kv_network
    ):
        problems.append(
            f"kv-host = {config.kv_host}: must be a loopback address unless --insecure-kv-network "
            "is set: mooncake's ports ask for no key"
        )
    if isinstance(config, DecodeConfig):
        problems.extend(_decode_checks(config))
    return problems


def _decode_checks(config: DecodeConfig) -> list[str]:
    problems: list[str] = []
    if not (config.prefill_address or config.prefill_peers_file):
        problems.append(
            "prefill-address is not set: must name at least one prefill service, unless "
            "prefill-peers-file is set"
        )
    problems.extend(
        f"prefill-address = {address}: must be host:port"
        for address in config.prefill_address
        if not is_host_port(address)
    )
    if config.prefill_peers_file:
        try:
            read_peers_file(Path(config.prefill_peers_file))
        except ConfigError as error:
            problems.extend(f"prefill-peers-file: {problem}" for problem in error.problems)
    if config.kv_slot_bytes > config.kv_staging_bytes:
        problems.append(
            f"kv-slot-bytes = {config.kv_slot_bytes}: must be at most kv-staging-bytes = "
            f"{config.kv_staging_bytes}"
        )
    if config.renew_interval_s > config.lease_s / 2:
        problems.append(
            f"renew-interval-s = {config.renew_interval_s}: must be at most half of lease-s = "
            f"{config.lease_s}"
        )
    return problems


def is_loopback(host: str) -> bool:
    """Whether a listen address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _resolve(config: ServiceConfig) -> ServiceConfig:
    """Fill in what an empty value stands for."""
    socket_dir = config.kv_socket_dir or str(
        Path(tempfile.gettempdir()) / f"tandem-kv-{os.getuid()}"
    )
    name = config.served_model_name or Path(config.model).resolve().name
    return replace(config, kv_socket_dir=socket_dir, served_model_name=name)


def _help_text(info: KeyInfo, default: object) -> str:
    parts = [info.help]
    if info.choices:
        parts.append(f"One of: {', '.join(info.choices)}.")
    if info.unit:
        parts.append(f"Unit: {info.unit}.")
    if default not in ("", ()):
        parts.append(f"Default: {default}.")
    return " ".join(parts)


def render_reference() -> str:
    """Return docs/configuration.md: a table of every key of both roles."""
    lines = [
        "# Configuration",
        "",
        "Every key can be a flag (`--block-size 64`), an environment variable",
        "(`TANDEM_BLOCK_SIZE=64`) or an entry of a TOML file (`--config FILE`, tables `[common]`,",
        "`[prefill]`, `[decode]`, e.g. `block-size = 64`). Flags win over the environment, which",
        "wins over the file. A list is repeated as a flag and comma-separated in the environment.",
        "Unknown keys are errors. This page is generated: `make docs`.",
    ]
    common = set(key_info(Role.PREFILL)) & set(key_info(Role.DECODE))
    sections = [("Both services", Role.PREFILL, common)]
    sections += [(f"The {role.value} service", role, set(key_info(role)) - common) for role in Role]
    for title, role, names in sections:
        lines += ["", f"## {title}", "", "| key | default | unit | what it does |"]
        lines.append("| --- | --- | --- | --- |")
        for name, (info, _, default) in key_info(role).items():
            if name in names:
                shown = f"`{default}`" if default not in ("", ()) else ""
                choices = f" One of: {', '.join(info.choices)}." if info.choices else ""
                lines.append(
                    f"| `{_dashed(name)}` | {shown} | {info.unit} | {info.help}{choices} |"
                )
    return "\n".join(lines) + "\n"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _underscored(name: str) -> str:
    return name.replace("-", "_")
