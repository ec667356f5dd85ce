"""The launcher against small service processes that misbehave as told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.launcher import Launcher, LauncherError, LauncherStoppedError, LaunchSettings
from tests.support.fake_service import EXIT_STATUS, LAST_WORDS
from tests.support.processes import wait_until

FAKE = "tests.support.fake_service"


def make_settings(
    record_dir: Path,
    *,
    decode_arguments: tuple[str, ...] = (),
    prefill_arguments: tuple[str, ...] = (),
    **fields: object,
) -> LaunchSettings:
    """Settings that start fake services."""
    return LaunchSettings(
        model_dir=Path("/model"),
        prefill_module=FAKE,
        decode_module=FAKE,
        service_arguments=(f"--fake-record={record_dir}",),
        decode_arguments=decode_arguments,
        prefill_arguments=prefill_arguments,
        drain_grace_s=0.0,
        **fields,  # type: ignore[arg-type]  # named fields of a test
    )


def records(record_dir: Path) -> list[dict[str, object]]:
    """What the fake services saw, one record per process."""
    return [json.loads(path.read_text()) for path in sorted(record_dir.glob("*.json"))]


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie that nobody reaped yet does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@contextlib.contextmanager
def all_gone_after(record_dir: Path) -> Iterator[None]:
    """Checks that no recorded process outlives the block."""
    yield
    pids = [int(str(record["pid"])) for record in records(record_dir)]
    assert pids
    assert [pid for pid in pids if is_alive(pid)] == []


def test_launcher_start_returns_addresses_and_stop_leaves_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, num_prefill=2, num_decode=1)
    with all_gone_after(tmp_path), Launcher(settings) as launcher:
        services = launcher.start()
        assert len(services.prefill) == 2
        assert len(services.decode) == 1
        assert set(launcher.pids()) == {"prefill-0", "prefill-1", "decode-0"}
        for address in (*services.prefill, *services.decode):
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=5):
                pass
    socket_dirs = {
        argument.partition("=")[2]
        for record in records(tmp_path)
        for argument in record["arguments"]  # type: ignore[attr-defined]  # a list, from JSON
        if argument.startswith("--kv-socket-dir=")
    }
    assert len(socket_dirs) == 1
    assert not Path(socket_dirs.pop()).exists()


def test_launcher_gives_children_private_sockets_honest_threads_and_peers(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, num_threads=3, kv_engine="loopback")
    with Launcher(settings) as launcher:
        services = launcher.start()
    prefill, decode = sorted(
        records(tmp_path), key=lambda record: "--prefill-address" in str(record["arguments"])
    )
    for record in (prefill, decode):
        assert record["socket_dir_mode"] == 0o700
        assert record["omp_num_threads"] == "3"
        arguments = record["arguments"]
        assert isinstance(arguments, list)
        assert {"--model=/model", "--kv-engine=loopback", "--num-threads=3"} <= set(arguments)
    decode_arguments = decode["arguments"]
    assert isinstance(decode_arguments, list)
    assert f"--prefill-address={services.prefill[0]}" in decode_arguments


def test_launcher_decode_port_counts_up(tmp_path: Path) -> None:
    first = consecutive_free_ports(2)
    with Launcher(make_settings(tmp_path, num_decode=2, decode_port=first)) as launcher:
        services = launcher.start()
    assert services.decode == (f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}")


def consecutive_free_ports(count: int) -> int:
    """First of `count` ports in a row that nobody listens on."""
    for first in range(20_000, 30_000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def test_launcher_child_fails_at_start_names_it_and_its_last_words(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, decode_arguments=("--fake-fail",))
    with all_gone_after(tmp_path), Launcher(settings) as launcher:
        with pytest.raises(LauncherError) as caught:
            launcher.start()
        message = str(caught.value)
    assert message.startswith(f"decode-0 ended with exit status {EXIT_STATUS}")
    assert message.endswith(LAST_WORDS)


def test_launcher_child_dies_later_ends_wait_with_its_name(tmp_path: Path) -> None:
    with all_gone_after(tmp_path), Launcher(make_settings(tmp_path)) as launcher:
        launcher.start()
        os.kill(launcher.pids()["prefill-0"], signal.SIGKILL)
        with pytest.raises(LauncherError, match=r"prefill-0 ended by signal 9"):
            launcher.wait()


@pytest.mark.parametrize(
    ("role_arguments", "name"),
    [
        ({"prefill_arguments": ("--fake-hang",)}, "prefill-0"),
        ({"decode_arguments": ("--fake-no-kv",)}, "decode-0"),
    ],
)
def test_launcher_not_ready_in_time_names_the_service(
    tmp_path: Path, role_arguments: dict[str, tuple[str, ...]], name: str
) -> None:
    settings = make_settings(tmp_path, ready_timeout_s=3.0, **role_arguments)  # type: ignore[arg-type]
    launcher = Launcher(settings)
    expected = f"{name} was not ready within 3 s"
    with all_gone_after(tmp_path), launcher, pytest.raises(LauncherError, match=expected):
        launcher.start()


def test_launcher_stop_requested_while_starting_ends_start(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, prefill_arguments=("--fake-hang",))
    with all_gone_after(tmp_path), Launcher(settings) as launcher:

        def stop_when_recorded() -> None:
            wait_until(lambda: bool(records(tmp_path)), timeout_s=20, what="a child started")
            launcher.request_stop("SIGTERM")

        stopper = threading.Thread(target=stop_when_recorded)
        stopper.start()
        with pytest.raises(LauncherStoppedError, match="SIGTERM"):
            launcher.start()
        stopper.join()


def test_launcher_wait_returns_the_cause_of_a_stop(tmp_path: Path) -> None:
    with Launcher(make_settings(tmp_path)) as launcher:
        launcher.start()
        launcher.request_stop("SIGINT")
        assert launcher.wait() == "SIGINT"


def test_launcher_child_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, decode_arguments=("--fake-deaf",), kill_after_s=0.2)
    with all_gone_after(tmp_path), Launcher(settings) as launcher:
        launcher.start()


def test_launcher_log_lines_reach_the_file_and_the_listener(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    lines: list[tuple[str, str]] = []
    settings = make_settings(tmp_path, prefill_arguments=("--fake-fail",), log_dir=log_dir)
    launcher = Launcher(settings, on_log_line=lambda name, line: lines.append((name, line)))
    with launcher, pytest.raises(LauncherError):
        launcher.start()
    assert (log_dir / "prefill-0.log").read_text().splitlines() == ["starting", LAST_WORDS]
    assert lines == [("prefill-0", "starting"), ("prefill-0", LAST_WORDS)]


PARENT = """
import sys
from pathlib import Path
from tests.unit.tandem.test_launcher import make_settings
from tandem.launcher import Launcher
launcher = Launcher(make_settings(Path(sys.argv[1])))
launcher.start()
print("started", flush=True)
launcher.wait()
"""


def test_launcher_killed_leaves_no_child(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        pids = [int(str(record["pid"])) for record in records(tmp_path)]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
        parent.wait(timeout=10)
        wait_until(lambda: not any(map(is_alive, pids)), timeout_s=5, what="children gone")
    finally:
        parent.kill()
        parent.communicate(timeout=10)
