"""The file of peers while it changes: edits, renames, half a write, and what is wrong."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decode_service.peers_file import PeersFile
from serving_core.errors import ConfigError


@dataclass(kw_only=True)
class Bench:
    """A file and what is told of it."""

    path: Path
    told: list[tuple[str, ...]] = field(default_factory=list)
    invalid: list[bool] = field(default_factory=list)
    refused: str = ""
    file: PeersFile = field(init=False)

    def __post_init__(self) -> None:
        """Follow the file."""
        self.file = PeersFile(
            self.path, on_addresses=self._take, on_invalid=self.invalid.append, poll_interval_s=0.01
        )

    def _take(self, addresses: tuple[str, ...]) -> None:
        if self.refused and self.refused in addresses:
            raise ConfigError(["tls-ca: no such file"])
        self.told.append(addresses)

    def write(self, *addresses: str) -> None:
        """Write in place."""
        self.path.write_text(f"prefill-address = {list(addresses)}\n")

    def replace(self, *addresses: str) -> None:
        """Write another file and rename it."""
        other = self.path.with_suffix(".new")
        other.write_text(f"prefill-address = {list(addresses)}\n")
        other.replace(self.path)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A file with one peer."""
    one = Bench(path=tmp_path / "peers.toml")
    one.write("a:1")
    return one


async def test_changes_in_place_and_by_rename_are_told_once(bench: Bench) -> None:
    await bench.file.start()
    await bench.file.look()
    bench.write("a:1", "b:1")
    await bench.file.look()
    await bench.file.look()
    bench.replace("b:1")
    await bench.file.look()
    bench.write()
    await bench.file.look()
    assert bench.told == [("a:1",), ("a:1", "b:1"), ("b:1",), ()]
    assert set(bench.invalid) == {False}


async def test_change_within_one_tick_of_the_file_clock_is_noticed(bench: Bench) -> None:
    """Size and time of both are the same, so that only the content tells."""
    await bench.file.start()
    stamp = bench.path.stat()
    bench.path.write_text(bench.path.read_text().replace("a:1", "b:1"))
    os.utime(bench.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    await bench.file.look()
    assert bench.told == [("a:1",), ("b:1",)]


@pytest.mark.parametrize("content", ["", "prefill-address = [\n'b:1',\n'c:", "b:1", None])
async def test_wrong_file_keeps_the_peers_and_is_told_once(
    bench: Bench, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.file.start()
    if content is None:
        bench.path.unlink()
    else:
        bench.path.write_text(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await bench.file.look()
    assert bench.told == [("a:1",)]
    assert bench.invalid == [True] * 3
    assert len(caplog.records) == 1
    assert str(bench.path) in caplog.text
    bench.write("b:1")
    await bench.file.look()
    assert bench.told[-1] == ("b:1",)
    assert bench.invalid[-1] is False


async def test_empty_file_at_the_start_means_no_peers_yet(bench: Bench) -> None:
    bench.path.write_text("")
    await bench.file.start()
    await bench.file.look()
    assert (bench.told, bench.invalid) == ([()], [False])
    bench.write("a:1")
    await bench.file.look()
    assert bench.told == [(), ("a:1",)]


async def test_wrong_file_at_the_start_is_an_error(bench: Bench) -> None:
    bench.write("a")
    with pytest.raises(ConfigError, match="prefill-address = 'a'"):
        await bench.file.start()


async def test_peers_that_cannot_be_taken_are_told_again_at_the_next_look(bench: Bench) -> None:
    await bench.file.start()
    bench.refused = "b:1"
    bench.write("b:1")
    await bench.file.look()
    assert bench.invalid == [True]
    bench.refused = ""
    await bench.file.look()
    assert bench.told == [("a:1",), ("b:1",)]
    assert bench.invalid == [True, False]
