"""Sessions: one per decode incarnation, closed when unused, bounded, reaped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from kv_transfer.engine.base import TargetDescriptor, TargetMemory, WriterLink
from kv_transfer.errors import ConnectError, PeerRefusedError
from kv_transfer.layout import RegionMap
from prefill_service.kv_push import SessionPusher
from prefill_service.sessions import DecodeSession, Peer, SessionTable
from serving_core.errors import (
    InvalidRequestError,
    OverloadedError,
    PrefillUnavailableError,
    SessionUnknownError,
)
from tests.support.eventually import until

CONNECT_TIMEOUT_S = 0.2


class FakeLink:
    """A link that notes its end."""

    def __init__(self) -> None:
        self.is_dead = False
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


class FakePusher:
    """What a session pushes with; closes its link like the real one."""

    def __init__(self, link: FakeLink) -> None:
        self.link = link

    def peer_is_dead(self) -> bool:
        return self.link.is_dead

    def proves_quiet(self) -> bool:
        return True

    def close(self) -> None:
        self.link.close()


class FakeEngine:
    """Connects at once, fails, or waits until the test lets it."""

    name = "fake"
    can_fence_writer = True

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def create_target(self, num_bytes: int) -> TargetMemory:
        raise AssertionError("prefill makes no target")

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> WriterLink:
        assert self.go_on.wait(10.0)
        if self.error is not None:
            raise self.error
        link = FakeLink()
        self.links.append(link)
        return cast(WriterLink, link)


class Table:
    """A session table over the fakes."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.dead: list[tuple[str, str]] = []
        self.executor = ThreadPoolExecutor(max_workers=2)
        self.sessions = SessionTable(
            engine=self.engine,
            prefill_incarnation="prefill-1",
            make_pusher=lambda link, _: cast(SessionPusher, FakePusher(cast(FakeLink, link))),
            on_dead=lambda session, message: self.dead.append((session.session_id, message)),
            executor=self.executor,
            block_size=4,
            max_num_sessions=2,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    async def open(self, decode_incarnation: str) -> DecodeSession:
        return await self.sessions.open(
            Peer(
                decode_incarnation=decode_incarnation,
                descriptor=TargetDescriptor(
                    engine="fake", address="there", access_key=b"secret", size_bytes=64
                ),
                region=RegionMap(num_blocks=4, size_bytes=64, base_address=0, components=()),
            )
        )


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    yield made
    await made.sessions.close(5.0)
    made.engine.go_on.set()
    made.executor.shutdown()
    assert all(link.is_closed.is_set() for link in made.engine.links)


def closed(link: FakeLink) -> Callable[[], bool]:
    return link.is_closed.is_set


async def test_open_session_is_found_by_its_id_only(table: Table) -> None:
    session = await table.open("decode-1")
    assert table.sessions.get(session.session_id) is session
    with pytest.raises(SessionUnknownError):
        table.sessions.get("decode-1")


async def test_new_handshake_retires_the_session_before_it(table: Table) -> None:
    first = await table.open("decode-1")
    second = await table.open("decode-1")
    with pytest.raises(SessionUnknownError):
        table.sessions.get(first.session_id)
    assert table.sessions.get(second.session_id) is second
    assert len(table.sessions) == 1
    await until(closed(table.engine.links[0]))
    assert not table.engine.links[1].is_closed.is_set()


async def test_retired_session_is_closed_with_its_last_job(table: Table) -> None:
    session = await table.open("decode-1")
    session.enter()
    session.enter()
    await table.open("decode-1")
    session.leave()
    await asyncio.sleep(0.01)
    assert not table.engine.links[0].is_closed.is_set()
    session.leave()
    await until(closed(table.engine.links[0]))


async def test_too_many_sessions_are_refused_but_not_a_renewed_one(table: Table) -> None:
    await table.open("decode-1")
    await table.open("decode-2")
    with pytest.raises(OverloadedError, match="the limit is 2"):
        await table.open("decode-3")
    await table.open("decode-2")
    assert len(table.engine.links) == 3


async def test_handshakes_under_way_count(table: Table) -> None:
    table.engine.go_on.clear()
    opening = [asyncio.create_task(table.open("decode-1")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await table.open("decode-1")
    table.engine.go_on.set()
    await asyncio.gather(*opening)
    assert len(table.sessions) == 1


async def test_dead_decode_is_reported_and_its_session_forgotten(table: Table) -> None:
    dead, alive = await table.open("decode-1"), await table.open("decode-2")
    table.engine.links[0].is_dead = True
    table.sessions.reap_dead()
    table.sessions.reap_dead()
    assert table.dead == [(dead.session_id, "decode decode-1 died")]
    with pytest.raises(SessionUnknownError):
        table.sessions.get(dead.session_id)
    assert table.sessions.get(alive.session_id) is alive
    await until(closed(table.engine.links[0]))


async def test_slow_connection_is_unavailable_and_closed_when_it_comes(table: Table) -> None:
    table.engine.go_on.clear()
    with pytest.raises(PrefillUnavailableError, match="not reached within"):
        await table.open("decode-1")
    assert len(table.sessions) == 0
    table.engine.go_on.set()
    await until(lambda: len(table.engine.links) == 1 and table.engine.links[0].is_closed.is_set())


async def test_cancelled_handshake_leaves_no_link(table: Table) -> None:
    table.engine.go_on.clear()
    opening = asyncio.create_task(table.open("decode-1"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    table.engine.go_on.set()
    await until(lambda: len(table.engine.links) == 1 and table.engine.links[0].is_closed.is_set())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectError("nobody there"), PrefillUnavailableError),
        (PeerRefusedError("wrong key"), InvalidRequestError),
    ],
)
async def test_refused_connection_tells_whether_a_retry_can_help(
    table: Table, error: Exception, expected: type[Exception]
) -> None:
    table.engine.error = error
    with pytest.raises(expected, match=str(error)):
        await table.open("decode-1")
    assert len(table.sessions) == 0


def test_peer_does_not_print_its_secret() -> None:
    peer = Peer(
        decode_incarnation="decode-1",
        descriptor=TargetDescriptor(
            engine="fake", address="there", access_key=b"secret", size_bytes=64
        ),
        region=RegionMap(num_blocks=4, size_bytes=64, base_address=0, components=()),
    )
    assert "secret" not in repr(peer)
