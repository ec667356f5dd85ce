"""What counts as an address, and what a file of addresses says, whole or cut off anywhere."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving_core.errors import ConfigError
from serving_core.peer_addresses import is_host_port, read_peers_file

names = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
addresses = st.lists(st.builds("{}:{}".format, names, st.integers(1, 65535)), max_size=6)
comments = st.sampled_from(["", "# peers\n", "\n\n", '# prefill-address = ["no:1"]\n'])


@pytest.mark.parametrize(
    "address", ["a:1", "127.0.0.1:65535", "[::1]:50061", "prefill-0.svc.cluster.local:1", "a_b:2"]
)
def test_host_port_is_taken(address: str) -> None:
    assert is_host_port(address)


@pytest.mark.parametrize(
    "address",
    [
        "", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "a: 1", "a:1 ", " a:1", "a:1\n",
        "a b:1", "a:\u00b2", "a:\u0661", "::1:5", "[::1:5", "[127.0.0.1]:5", "[x]:5", "a:b:1",
        "unix:/tmp/x:1", "dns:///a:1", "ipv4:1.2.3.4:5", "a/b:1", "a,b:1", "-a:1", "\u00e4:1",
    ],
)  # fmt: skip
def test_what_is_no_host_port_is_refused(address: str) -> None:
    assert not is_host_port(address)


def refusal(file: Path, content: str) -> str:
    """The message about a wrong file."""
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_peers_file(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_file_addresses_come_once_and_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    file.write_text('# ours\nprefill-address = ["b:1", "a:1", "b:1"]\n')
    assert read_peers_file(file) == ("b:1", "a:1")


@pytest.mark.parametrize("content", ["", "\n", "# nothing yet\n"])
def test_file_that_says_nothing_is_told_from_an_empty_list(tmp_path: Path, content: str) -> None:
    file = tmp_path / "peers.toml"
    file.write_text(content)
    assert read_peers_file(file) is None
    file.write_text("prefill-address = []")
    assert read_peers_file(file) == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('prefill-address = [\n"a:1",\n"b:x",\n]', ":3: prefill-address = 'b:x'"),
        ("prefill-address = [\n'b',\n]", ":2: prefill-address = 'b'"),
        ("prefill-address = [7]", ":1: prefill-address = '7'"),
        ('prefill-address = "a:1"', "must be a list"),
        ('prefill-adress = ["a:1"]', "prefill-adress is an unknown key"),
        ('[decode]\nprefill-address = ["a:1"]', "decode is an unknown key"),
        ("a:1\nb:1\n", "line 1"),
    ],
)
def test_file_that_is_wrong_is_named_with_line_and_value(
    tmp_path: Path, content: str, words: str
) -> None:
    assert words in refusal(tmp_path / "peers.toml", content)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    with pytest.raises(ConfigError, match="No such file"):
        read_peers_file(file)
    with pytest.raises(ConfigError, match="directory"):
        read_peers_file(tmp_path)
    file.write_bytes(b'prefill-address = ["\xff:1"]')
    with pytest.raises(ConfigError, match="utf-8"):
        read_peers_file(file)
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="at most"):
        read_peers_file(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(before=comments, wanted=addresses, after=comments, data=st.data())
def test_file_that_is_cut_off_never_reads_as_another_list(
    tmp_path: Path, before: str, wanted: list[str], after: str, data: st.DataObject
) -> None:
    """What a reader sees while a writer is at work is a beginning of the file."""
    file = tmp_path / "peers.toml"
    items = "".join(f'  "{address}",\n' for address in wanted)
    content = f"{before}prefill-address = [\n{items}]\n{after}"
    file.write_text(content)
    whole = tuple(dict.fromkeys(wanted))
    assert read_peers_file(file) == whole
    file.write_text(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert read_peers_file(file) in (None, whole)
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - a refusal is one of the two right answers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_file_of_any_bytes_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "peers.toml"
    file.write_bytes(content)
    try:
        found = read_peers_file(file)
    except ConfigError:
        return
    assert all(is_host_port(address) for address in found or ())
