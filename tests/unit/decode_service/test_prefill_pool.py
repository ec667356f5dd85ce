"""The choice among peers, how peers come and go, and what a retry costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

import pytest
from prometheus_client import generate_latest

from decode_service.attempt_verdict import Retry
from decode_service.circuit_breaker import BreakerSettings
from decode_service.landing import Landing
from decode_service.prefill_peer import PeerState, PrefillSession
from decode_service.prefill_pool import ChosenPeer, PrefillPool
from decode_service.retry_budget import RetryBudget
from serving_core.errors import PrefillUnavailableError
from serving_core.telemetry import DecodeMetrics
from tests.support.eventually import until

PAUSE_S = 0.2


@dataclass(kw_only=True, eq=False)
class FakePeer:
    """A peer whose state the test sets."""

    address: str
    session: PrefillSession | None = None
    max_prompt_tokens: int | None = None
    num_pending_tokens: int = 0
    num_runs: int = 0
    is_running: bool = False
    is_closed: bool = False

    @property
    def state(self) -> PeerState:
        """READY with a session."""
        return PeerState.READY if self.session is not None else PeerState.CONNECTING

    def become_ready(self, max_prompt_tokens: int = 100, incarnation: str = "") -> None:
        """Shake hands."""
        self.max_prompt_tokens = max_prompt_tokens
        self.session = PrefillSession(
            session_id=self.address,
            prefill_incarnation=incarnation or self.address,
            max_prompt_tokens=max_prompt_tokens,
            landing=cast(Landing, None),
        )

    def invalidate(self, session: PrefillSession, cause: str) -> None:
        """Lose the handshake."""
        if self.session is session:
            self.session = None

    async def run(self) -> None:
        """Do nothing until cancelled."""
        self.num_runs += 1
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True


@dataclass(kw_only=True)
class Bench:
    """A pool of peers that are made as the pool asks for them."""

    wait_s: float
    pool: PrefillPool = field(init=False)
    made: list[FakePeer] = field(default_factory=list)
    signals: list[bool] = field(default_factory=list)
    quarantined: dict[str, int] = field(default_factory=dict)
    ending: dict[str, int] = field(default_factory=dict)
    metrics: DecodeMetrics = field(default_factory=lambda: DecodeMetrics("test"))

    def __post_init__(self) -> None:
        """Make the pool."""

        def make_peer(address: str) -> FakePeer:
            self.made.append(FakePeer(address=address))
            return self.made[-1]

        self.pool = PrefillPool(
            make_peer=make_peer,  # type: ignore[arg-type]  # all that the pool calls is there
            num_quarantined_blocks=lambda address: self.quarantined.get(address, 0),
            num_ending_tickets=lambda address: self.ending.get(address, 0),
            max_quarantined_blocks=4,
            wait_s=self.wait_s,
            breaker=BreakerSettings(max_failures=2, pause_s=PAUSE_S),
            metrics=self.metrics,
            on_can_move_kv=self.signals.append,
            clock=monotonic,
        )

    @property
    def peers(self) -> list[FakePeer]:
        """The first two."""
        return self.made[:2]

    async def chosen_address(self, num_tokens: int = 10) -> str:
        """Address of the choice."""
        return (await self.pool.choose(num_tokens)).peer.address

    async def again(self, failed: ChosenPeer, retry: Retry) -> str | None:
        """Address of the second choice."""
        chosen = await self.pool.choose_again(10, failed=failed, retry=retry)
        return None if chosen is None else chosen.peer.address

    def fail(self, chosen: ChosenPeer, times: int = 2) -> None:
        """Attempts that fail by the peer's fault; two open its breaker."""
        for _ in range(times):
            with self.pool.attempt(chosen, 10) as trial:
                trial.fail("test")

    def shown(self) -> str:
        """The metrics as text."""
        return generate_latest(self.metrics.registry).decode()


@asynccontextmanager
async def running_bench(wait_s: float, *addresses: str) -> AsyncIterator[Bench]:
    """A bench whose pool is stopped in the end."""
    bench = Bench(wait_s=wait_s)
    bench.pool.configure(addresses or ("a:1", "b:1"))
    yield bench
    await bench.pool.stop()
    assert all(peer.is_closed for peer in bench.made)


@asynccontextmanager
async def ready_bench(wait_s: float = 0.0, *addresses: str) -> AsyncIterator[Bench]:
    """The same with peers that are ready."""
    async with running_bench(wait_s, *addresses) as bench:
        for peer in bench.made:
            peer.become_ready()
        bench.pool.peer_changed()
        yield bench


async def test_choose_takes_the_peer_with_fewest_pending_tokens() -> None:
    async with ready_bench() as bench:
        with bench.pool.attempt(await bench.pool.choose(50), 50):
            assert await bench.chosen_address() == "b:1"
            with bench.pool.attempt(await bench.pool.choose(60), 60):
                assert await bench.chosen_address() == "a:1"
        assert [peer.num_pending_tokens for peer in bench.peers] == [0, 0]


async def test_choose_skips_peers_that_are_too_small_or_quarantined() -> None:
    async with running_bench(0.0) as bench:
        bench.peers[0].become_ready(max_prompt_tokens=8)
        bench.peers[1].become_ready()
        assert await bench.chosen_address() == "b:1"
        bench.quarantined["b:1"] = 4
        with pytest.raises(PrefillUnavailableError, match=r"b:1 is ready \(4 blocks quarantined"):
            await bench.chosen_address()


async def test_choose_waits_for_a_peer_to_become_ready() -> None:
    async with running_bench(5.0) as bench:
        choosing = asyncio.create_task(bench.chosen_address())
        await asyncio.sleep(0)
        assert not choosing.done()
        bench.peers[1].become_ready()
        bench.pool.peer_changed()
        assert await choosing == "b:1"


async def test_choose_without_a_ready_peer_is_unavailable_with_a_delay() -> None:
    async with running_bench(0.01) as bench:
        with pytest.raises(PrefillUnavailableError, match="a:1 is connecting") as caught:
            await bench.chosen_address()
        assert caught.value.retry_after_s > 0


async def test_choose_without_any_peer_does_not_wait() -> None:
    async with running_bench(60.0) as bench:
        bench.pool.configure([])
        with pytest.raises(PrefillUnavailableError, match="none is configured"):
            await bench.chosen_address()


async def test_can_move_kv_is_told_once_per_change() -> None:
    async with running_bench(0.0) as bench:
        bench.pool.peer_changed()
        for peer in bench.peers:
            peer.become_ready()
            bench.pool.peer_changed()
        bench.peers[0].session = bench.peers[1].session = None
        bench.pool.peer_changed()
        assert bench.signals == [False, True, False]


async def test_max_prompt_tokens_is_known_when_every_peer_has_told() -> None:
    async with running_bench(0.0) as bench:
        bench.peers[0].become_ready(8)
        assert bench.pool.max_prompt_tokens is None
        bench.peers[1].become_ready(16)
        assert bench.pool.max_prompt_tokens == 16


async def test_choose_skips_a_peer_whose_breaker_is_open_until_a_probe_succeeds() -> None:
    async with ready_bench() as bench:
        first = await bench.pool.choose(10)
        bench.fail(first)
        assert 'breaker_state{address="a:1"} 2.0' in bench.shown()
        assert await bench.chosen_address() == "b:1"
        await asyncio.sleep(PAUSE_S)
        assert await bench.chosen_address() == "a:1"
        with bench.pool.attempt(first, 0) as trial:
            assert 'breaker_state{address="a:1"} 1.0' in bench.shown()
            assert await bench.chosen_address() == "b:1"  # one probe, not two
            trial.succeed()
        assert 'breaker_state{address="a:1"} 0.0' in bench.shown()
        assert await bench.chosen_address() == "a:1"


async def test_choose_with_every_breaker_open_fails_at_once_and_says_when_to_come_back() -> None:
    async with ready_bench(PAUSE_S / 2) as bench:
        for _ in bench.peers:
            bench.fail(await bench.pool.choose(10))
        started_s = monotonic()
        with pytest.raises(PrefillUnavailableError, match="breaker open") as caught:
            await bench.chosen_address()
        assert monotonic() - started_s < PAUSE_S / 4
        assert caught.value.retry_after_s >= PAUSE_S / 2


async def test_choose_waits_for_the_end_of_a_pause_that_is_near() -> None:
    async with ready_bench(60.0, "a:1") as bench:
        bench.fail(await bench.pool.choose(10))
        async with asyncio.timeout(5):
            assert await bench.chosen_address() == "a:1"


async def test_another_process_at_the_address_closes_the_breaker() -> None:
    async with ready_bench(0.0, "a:1") as bench:
        bench.fail(await bench.pool.choose(10))
        bench.made[0].become_ready(incarnation="another")
        bench.pool.peer_changed()
        assert await bench.chosen_address() == "a:1"


@pytest.mark.parametrize("retry", [Retry.ELSEWHERE, Retry.ELSEWHERE_IF_FREE, Retry.ANYWHERE])
async def test_choose_again_prefers_another_peer(retry: Retry) -> None:
    async with ready_bench(5.0) as bench:
        first = await bench.pool.choose(10)
        bench.peers[1].num_pending_tokens = 1000
        assert await bench.again(first, retry) == "b:1"


async def test_choose_again_takes_the_same_process_only_where_that_may_help() -> None:
    async with ready_bench(5.0, "a:1") as bench:
        first = await bench.pool.choose(10)
        started_s = monotonic()
        assert await bench.again(first, Retry.ELSEWHERE) is None
        assert await bench.again(first, Retry.ELSEWHERE_IF_FREE) is None
        assert monotonic() - started_s < 0.2  # nobody else can come: the client must not wait
        assert await bench.again(first, Retry.ANYWHERE) == "a:1"
        bench.made[0].become_ready(incarnation="another")
        assert await bench.again(first, Retry.ELSEWHERE) == "a:1"


async def test_choose_again_waits_a_moment_for_a_handshake() -> None:
    async with ready_bench(5.0) as bench:
        first = await bench.pool.choose(10)
        bench.peers[1].session = None
        choosing = asyncio.create_task(bench.again(first, Retry.ELSEWHERE))
        await asyncio.sleep(0)
        bench.peers[1].become_ready()
        bench.pool.peer_changed()
        assert await choosing == "b:1"


async def test_configure_adds_and_removes_and_leaves_the_rest_alone() -> None:
    async with ready_bench() as bench:
        await until(lambda: all(peer.is_running for peer in bench.made), pause_s=0.001)
        bench.pool.configure(["b:1", "c:1"])
        assert bench.pool.addresses == ("b:1", "c:1")
        await until(lambda: bench.made[0].is_closed, pause_s=0.001)
        await until(lambda: bench.made[2].is_running, pause_s=0.001)
        assert not bench.made[0].is_running
        assert [peer.num_runs for peer in bench.made] == [1, 1, 1]
        assert "a:1" not in bench.shown()
        bench.pool.configure(["b:1", "c:1"])
        assert [peer.address for peer in bench.made] == ["a:1", "b:1", "c:1"]


async def test_removed_peer_gets_nothing_new_and_closes_when_all_has_ended() -> None:
    async with ready_bench() as bench:
        first = await bench.pool.choose(10)
        with bench.pool.attempt(first, 10) as trial:
            bench.pool.configure(["b:1"])
            assert await bench.chosen_address() == "b:1"
            await asyncio.sleep(0.25)
            assert not bench.made[0].is_closed
            trial.succeed()
        bench.ending["a:1"] = 1
        await asyncio.sleep(0.25)
        assert not bench.made[0].is_closed, "its writers are asked through its channel"
        bench.ending.clear()
        await until(lambda: bench.made[0].is_closed, pause_s=0.01)


async def test_peer_that_comes_back_while_it_leaves_is_the_same_one() -> None:
    async with ready_bench() as bench:
        first = await bench.pool.choose(10)
        with bench.pool.attempt(first, 10) as trial:
            bench.pool.configure(["b:1"])
            bench.pool.configure(["b:1", "a:1"])
            trial.succeed()
        await until(lambda: bench.made[0].is_running, pause_s=0.001)
        assert len(bench.made) == 2
        bench.made[0].become_ready()
        assert await bench.chosen_address() == "a:1"
        await asyncio.sleep(0.25)
        assert not bench.made[0].is_closed


def test_retry_budget_is_a_share_of_the_traffic() -> None:
    budget = RetryBudget(requests_per_retry=10, burst=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]


def test_retry_budget_keeps_what_it_is_told_to_leave_and_takes_back() -> None:
    budget = RetryBudget(requests_per_retry=10, burst=2)
    assert [budget.spend(num_left=1), budget.spend(num_left=1), budget.spend()] == [
        True, False, True,
    ]  # fmt: skip
    budget.give_back()
    assert [budget.spend(), budget.spend()] == [True, False]
