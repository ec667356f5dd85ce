"""The sending process's loop with an engine that ends its transfers when a test says so."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kv_transfer.engine.mooncake_child import COMMAND, DONE, REPLY, Sender

BASE, TARGET = 1 << 20, 1 << 30
WAIT_S = 10.0
EAGER_S, SLEEP_S = 2e-3, 30e-6


@dataclass
class ScriptedEngine:
    """Transfers get ids from 1 on; `status` tells how one stands, `asked_s` when that was asked."""

    status: Callable[[int], int]
    submitted: list[tuple[str, int, int, int]] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    refuses: bool = False

    def transfer_submit_write(self, session: str, source: int, target: int, size: int) -> int:
        """Take a transfer."""
        self.submitted.append((session, source, target, size))
        return 0 if self.refuses else len(self.submitted)

    def transfer_check_status(self, transfer_id: int) -> int:
        """Answer by the script."""
        self.asked_s.append(time.monotonic())
        return self.status(transfer_id)


class Loop:
    """A sender on a thread of its own, and its parent's end of the socket."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.parent.settimeout(WAIT_S)
        sender = Sender(engine, "peer:1", BASE, child)
        self._child = child
        self._thread = threading.Thread(target=sender.serve)
        self._thread.start()

    def write(self, tag: int) -> None:
        self.parent.send(COMMAND.pack(tag, 64 * tag, TARGET + tag, 100 + tag))

    def reply(self) -> tuple[int, int]:
        tag, status = REPLY.unpack(self.parent.recv(REPLY.size))
        return tag, status

    def close(self) -> None:
        self.parent.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._child.close()


@pytest.fixture
def start() -> Iterator[Callable[[ScriptedEngine], Loop]]:
    loops: list[Loop] = []

    def begin(engine: ScriptedEngine) -> Loop:
        loops.append(Loop(engine))
        return loops[-1]

    yield begin
    for loop in loops:
        loop.close()


def test_write_is_submitted_by_address_and_answered_when_it_has_ended(
    start: Callable[[ScriptedEngine], Loop],
) -> None:
    was_asked, may_end = threading.Event(), threading.Event()

    def status(_: int) -> int:
        was_asked.set()
        return DONE if may_end.is_set() else 0

    engine = ScriptedEngine(status)
    loop = start(engine)
    loop.write(3)
    assert was_asked.wait(WAIT_S)
    may_end.set()
    assert loop.reply() == (3, DONE)
    assert engine.submitted == [("peer:1", BASE + 192, TARGET + 3, 103)]


def test_write_that_ends_later_does_not_hold_up_the_next(
    start: Callable[[ScriptedEngine], Loop],
) -> None:
    may_end = threading.Event()
    engine = ScriptedEngine(lambda one: DONE if one == 2 or may_end.is_set() else 0)
    loop = start(engine)
    loop.write(0)
    loop.write(1)
    assert loop.reply() == (1, DONE)
    may_end.set()
    assert loop.reply() == (0, DONE)


@pytest.mark.parametrize("status", [-1, -2])
def test_write_that_fails_is_told_once_and_not_asked_for_again(
    start: Callable[[ScriptedEngine], Loop], status: int
) -> None:
    engine = ScriptedEngine(lambda _: status)
    loop = start(engine)
    loop.write(5)
    assert loop.reply() == (5, status)
    loop.close()
    assert len(engine.asked_s) == 1


def test_write_that_is_not_taken_is_told_and_never_asked_for(
    start: Callable[[ScriptedEngine], Loop],
) -> None:
    engine = ScriptedEngine(lambda _: 0, refuses=True)
    loop = start(engine)
    loop.write(5)
    tag, status = loop.reply()
    assert tag == 5
    assert status < 0
    assert engine.asked_s == []


def test_write_that_does_not_end_is_asked_for_with_sleeps(
    start: Callable[[ScriptedEngine], Loop],
) -> None:
    """A stopped peer must not cost a core for as long as it is stopped."""
    engine = ScriptedEngine(lambda _: DONE if engine.asked_s[-1] > engine.asked_s[0] + 0.05 else 0)
    loop = start(engine)
    loop.write(1)
    assert loop.reply() == (1, DONE)
    later = [asked_s for asked_s in engine.asked_s if asked_s > engine.asked_s[0] + 2 * EAGER_S]
    gaps = [after - before for before, after in itertools.pairwise(later)]
    assert min(gaps) >= SLEEP_S
