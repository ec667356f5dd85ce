"""The choice among peers, and what a retry costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from decode_service.kv_receive import RetryBudget
from decode_service.prefill_peer import PeerState, PrefillSession
from decode_service.prefill_pool import PrefillPool
from serving_core.errors import PrefillUnavailableError


@dataclass(kw_only=True, eq=False)
class FakePeer:
    """A peer whose state the test sets."""

    address: str
    session: PrefillSession | None = None
    max_prompt_tokens: int | None = None
    num_pending_tokens: int = 0

    @property
    def state(self) -> PeerState:
        """READY with a session."""
        return PeerState.READY if self.session is not None else PeerState.CONNECTING

    def become_ready(self, max_prompt_tokens: int = 100) -> None:
        """Shake hands."""
        self.max_prompt_tokens = max_prompt_tokens
        self.session = PrefillSession(
            session_id=self.address,
            prefill_incarnation=self.address,
            max_prompt_tokens=max_prompt_tokens,
        )

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()


@dataclass(kw_only=True)
class Bench:
    """A pool of two peers."""

    pool: PrefillPool
    peers: list[FakePeer]
    signals: list[bool]
    quarantined: dict[str, int]


@pytest.fixture
def make_bench() -> Callable[[float], Bench]:
    """Builds a bench with a longest wait."""

    def make(wait_s: float) -> Bench:
        signals: list[bool] = []
        quarantined: dict[str, int] = {}
        pool = PrefillPool(
            num_quarantined_blocks=lambda address: quarantined.get(address, 0),
            max_quarantined_blocks=4,
            wait_s=wait_s,
            on_can_move_kv=signals.append,
        )
        peers = [FakePeer(address="a:1"), FakePeer(address="b:1")]
        pool.start(peers)  # type: ignore[arg-type]  # all that the pool calls is there
        return Bench(pool=pool, peers=peers, signals=signals, quarantined=quarantined)

    return make


async def chosen_address(bench: Bench, num_tokens: int = 10) -> str:
    """Address of the choice."""
    return (await bench.pool.choose(num_tokens)).peer.address


async def test_choose_takes_the_peer_with_fewest_pending_tokens(
    make_bench: Callable[[float], Bench],
) -> None:
    bench = make_bench(0.0)
    for peer in bench.peers:
        peer.become_ready()
    with bench.pool.pending(bench.peers[0], 50):  # type: ignore[arg-type]
        assert await chosen_address(bench) == "b:1"
        with bench.pool.pending(bench.peers[1], 60):  # type: ignore[arg-type]
            assert await chosen_address(bench) == "a:1"
    assert [peer.num_pending_tokens for peer in bench.peers] == [0, 0]
    await bench.pool.stop()


async def test_choose_skips_peers_that_are_too_small_or_quarantined(
    make_bench: Callable[[float], Bench],
) -> None:
    bench = make_bench(0.0)
    bench.peers[0].become_ready(max_prompt_tokens=8)
    bench.peers[1].become_ready()
    assert await chosen_address(bench) == "b:1"
    bench.quarantined["b:1"] = 4
    with pytest.raises(PrefillUnavailableError, match=r"b:1 is ready \(4 blocks quarantined"):
        await chosen_address(bench)
    await bench.pool.stop()


async def test_choose_waits_for_a_peer_to_become_ready(
    make_bench: Callable[[float], Bench],
) -> None:
    bench = make_bench(5.0)
    choosing = asyncio.create_task(chosen_address(bench))
    await asyncio.sleep(0)
    assert not choosing.done()
    bench.peers[1].become_ready()
    bench.pool.peer_changed()
    assert await choosing == "b:1"
    await bench.pool.stop()


async def test_choose_without_peers_is_unavailable_with_a_delay(
    make_bench: Callable[[float], Bench],
) -> None:
    bench = make_bench(0.01)
    with pytest.raises(PrefillUnavailableError, match="a:1 is connecting") as caught:
        await chosen_address(bench)
    assert caught.value.retry_after_s > 0
    await bench.pool.stop()


async def test_can_move_kv_is_told_once_per_change(make_bench: Callable[[float], Bench]) -> None:
    bench = make_bench(0.0)
    bench.pool.peer_changed()
    for peer in bench.peers:
        peer.become_ready()
        bench.pool.peer_changed()
    bench.peers[0].session = bench.peers[1].session = None
    bench.pool.peer_changed()
    assert bench.signals == [False, True, False]
    await bench.pool.stop()


async def test_max_prompt_tokens_is_known_when_every_peer_has_told(
    make_bench: Callable[[float], Bench],
) -> None:
    bench = make_bench(0.0)
    bench.peers[0].become_ready(8)
    assert bench.pool.max_prompt_tokens is None
    bench.peers[1].become_ready(16)
    assert bench.pool.max_prompt_tokens == 16
    await bench.pool.stop()


def test_retry_budget_is_a_share_of_the_traffic() -> None:
    budget = RetryBudget(requests_per_retry=10, burst=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.earn()
    assert [budget.spend(), budget.spend()] == [True, False]
