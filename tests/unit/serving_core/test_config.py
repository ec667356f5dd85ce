"""Configuration: precedence, all problems at once, unknown keys, and the frozen list of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving_core.config import (
    DecodeConfig,
    PrefillConfig,
    Role,
    flag_names,
    key_info,
    load_config,
    load_decode_config,
    render_reference,
)
from serving_core.errors import ConfigError

# A new key needs a default with a reason, a unit, a test, docs, and a line here.
COMMON_KEYS = {
    "model", "served_model_name", "dtype", "device", "num_threads", "host", "port", "insecure",
    "tls_cert", "tls_key", "tls_ca", "grpc_reflection", "metrics_port", "log_level", "block_size",
    "num_kv_blocks", "max_model_len", "max_num_seqs", "max_queued_requests", "kv_engine",
    "kv_socket_dir", "kv_host", "insecure_kv_network", "kv_protocol", "kv_device",
    "drain_grace_s",
}  # fmt: skip
PREFILL_KEYS = {
    "max_num_batched_tokens", "grant_timeout_s", "drain_timeout_s", "event_timeout_s",
    "connect_timeout_s", "max_decode_sessions",
}  # fmt: skip
DECODE_KEYS = {
    "prefill_address", "prefill_peers_file", "default_request_timeout_s", "default_max_tokens",
    "prefill_wait_s", "prefill_silence_s", "lease_s", "renew_interval_s", "revoke_timeout_s",
    "reap_interval_s", "quarantine_cap_blocks", "kv_staging_bytes", "kv_slot_bytes",
    "max_unread_tokens", "graph_capture",
}  # fmt: skip


def load_prefill(
    tmp_path: Path, *, toml: str = "", flags: dict[str, object] | None = None, **env: str
) -> PrefillConfig:
    """A prefill configuration from all three sources."""
    file = tmp_path / "tandem.toml"
    file.write_text(toml)
    given = {"model": str(tmp_path), **(flags or {})}
    config = load_config(Role.PREFILL, file, given, env)
    assert isinstance(config, PrefillConfig)
    return config


def problems_of(tmp_path: Path, **kwargs: object) -> tuple[str, ...]:
    """The problems of a configuration that must have some."""
    with pytest.raises(ConfigError) as caught:
        load_prefill(tmp_path, **kwargs)  # type: ignore[arg-type]
    return caught.value.problems


def test_key_list_is_frozen() -> None:
    assert set(key_info(Role.PREFILL)) == COMMON_KEYS | PREFILL_KEYS
    assert set(key_info(Role.DECODE)) == COMMON_KEYS | DECODE_KEYS


def test_flags_win_over_environment_which_wins_over_file(tmp_path: Path) -> None:
    toml = "[common]\nblock-size = 1\nmax-num-seqs = 1\n[prefill]\nblock-size = 2\nport = 1\n"
    config = load_prefill(tmp_path, toml=toml, flags={"port": "3"}, TANDEM_PORT="2")
    assert (config.block_size, config.max_num_seqs, config.port) == (2, 1, 3)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    problems = problems_of(
        tmp_path,
        toml="[common]\nblok-size = 1\n[other]\nx = 1\n",
        flags={"host": "0.0.0.0", "port": "70000", "device": "tpu", "num_threads": "two"},
        TANDEM_NO_SUCH_KEY="1",
    )
    for words in ("blok-size", "[other]", "0.0.0.0", "70000", "tpu", "two", "TANDEM_NO_SUCH_KEY"):
        assert sum(words in problem for problem in problems) == 1, words


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e999"])
def test_numbers_out_of_their_range_are_refused(tmp_path: Path, text: str) -> None:
    [problem] = problems_of(tmp_path, flags={"drain_grace_s": text})
    assert "drain-grace-s" in problem


@pytest.mark.parametrize(
    ("host", "extra", "is_allowed"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("localhost", {}, True),
        ("0.0.0.0", {}, False),
        ("::", {}, False),
        ("example.test", {}, False),
        ("0.0.0.0", {"insecure": True}, True),
        ("0.0.0.0", {"tls_cert": "c", "tls_key": "k"}, True),
    ],
)
def test_other_hosts_than_loopback_need_tls_or_the_insecure_flag(
    tmp_path: Path, host: str, extra: dict[str, object], is_allowed: bool
) -> None:
    flags = {"host": host, **extra}
    if is_allowed:
        assert load_prefill(tmp_path, flags=flags).host == host
    else:
        assert "--insecure" in problems_of(tmp_path, flags=flags)[0]


def test_missing_model_directory_is_named(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, flags={"model": "/no/such/model"})
    assert "/no/such/model" in problem


def test_command_line_of_decode_is_read(tmp_path: Path) -> None:
    argv = [
        f"--model={tmp_path}",
        "--prefill-address=127.0.0.1:1",
        "--prefill-address=127.0.0.1:2",
        "--no-graph-capture",
        "--lease-s=4",
    ]
    config = load_decode_config(argv)
    assert isinstance(config, DecodeConfig)
    assert config.prefill_address == ("127.0.0.1:1", "127.0.0.1:2")
    assert (config.graph_capture, config.lease_s) == (False, 4.0)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:99999", "h:x"])
def test_bad_prefill_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="prefill-address"):
        load_decode_config([f"--model={tmp_path}", f"--prefill-address={address}"])


def test_peers_file_stands_in_for_addresses_and_may_be_empty(tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.touch()
    config = load_decode_config([f"--model={tmp_path}", f"--prefill-peers-file={peers}"])
    assert (config.prefill_address, config.prefill_peers_file) == ((), str(peers))


def test_every_problem_of_a_peers_file_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.write_text('prefill-address = [\n  "a:1",\n  "b",\n  "c:0",\n]\n')
    with pytest.raises(ConfigError) as caught:
        load_decode_config([f"--model={tmp_path}", f"--prefill-peers-file={peers}"])
    assert caught.value.problems == (
        f"prefill-peers-file: {peers}:3: prefill-address = 'b': must be host:port",
        f"prefill-peers-file: {peers}:4: prefill-address = 'c:0': must be host:port",
    )


def test_peers_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_decode_config([f"--model={tmp_path}", f"--prefill-peers-file={tmp_path / 'x'}"])


def test_environment_of_the_other_role_is_no_problem(tmp_path: Path) -> None:
    load_prefill(tmp_path, TANDEM_PREFILL_ADDRESS="127.0.0.1:1")


def test_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    assert "tandem.toml" in problems_of(tmp_path, toml="not toml")[0]


def test_reference_has_a_row_for_every_key() -> None:
    text = render_reference()
    for role in Role:
        for flag in flag_names(role):
            assert f"| `{flag.removeprefix('--')}` |" in text
