"""The prefill services of the configuration, and the choice among them. Event loop thread only.

A request goes to the usable peer with the fewest prompt tokens that are still to be computed
there. A peer is usable with a valid handshake, with a breaker that lets requests through, and with
fewer quarantined blocks than the cap: blocks that its dead or silent writers hold must not eat up
the pool.

    configure(with it) -> member -> configure(without it) -> leaving -> closed
                            ^                                   |
                            +--------- configure(with it) ------+

A peer that leaves gets no new request. Its channel stays open until its hand-offs have ended and
its writers are proven quiet, because it is what they are asked through.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from decode_service.attempt_verdict import Retry
from decode_service.circuit_breaker import BreakerSettings, BreakerState, CircuitBreaker, Trial
from decode_service.prefill_peer import PeerState, PrefillPeer, PrefillSession
from serving_core.errors import PrefillUnavailableError
from serving_core.telemetry import DecodeMetrics

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_LEAVING_CHECK_INTERVAL_S = 0.2
_DEFAULT_RETRY_AFTER_S = 0.5
_GAUGE_OF_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
# A handshake with a live process takes milliseconds; a client must not wait for a dead one.
_RETRY_WAIT_S = {
    Retry.NEVER: 0.0,
    Retry.ELSEWHERE: 0.5,
    Retry.ELSEWHERE_IF_FREE: 0.0,
    Retry.ANYWHERE: 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPeer:
    """A peer together with the handshake under which it was chosen."""

    peer: PrefillPeer
    session: PrefillSession


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A peer and what the pool knows of it; `task` keeps it ready, or closes it when it leaves."""

    peer: PrefillPeer
    breaker: CircuitBreaker
    task: "asyncio.Task[None]"
    incarnation: str = ""
    num_attempts: int = 0
    is_leaving: bool = False


class PrefillPool:
    """All peers. `on_can_move_kv` is told whenever the answer to `can_move_kv` changes."""

    def __init__(
        self,
        *,
        make_peer: Callable[[str], PrefillPeer],
        num_quarantined_blocks: Callable[[str], int],
        num_ending_tickets: Callable[[str], int],
        max_quarantined_blocks: int,
        wait_s: float,
        breaker: BreakerSettings,
        metrics: DecodeMetrics,
        on_can_move_kv: Callable[[bool], None],
        clock: Callable[[], float],
    ) -> None:
        """Start without peers.

        Args:
            make_peer: Makes the peer of an address; the pool runs and closes it.
            num_quarantined_blocks: Tells how many blocks the writers of an address hold.
            num_ending_tickets: Tells how many tickets of an address are not proven quiet.
            max_quarantined_blocks: Quarantined blocks from which on a peer gets no request.
            wait_s: Longest wait for a usable peer.
            breaker: Of every peer.
            metrics: Shows each peer's breaker.
            on_can_move_kv: Told the first answer, and each change of it.
            clock: Monotonic seconds.
        """
        self._make_peer = make_peer
        self._num_quarantined_blocks = num_quarantined_blocks
        self._num_ending_tickets = num_ending_tickets
        self._max_quarantined_blocks = max_quarantined_blocks
        self._wait_s = wait_s
        self._breaker = breaker
        self._metrics = metrics
        self._on_can_move_kv = on_can_move_kv
        self._clock = clock
        self._all: dict[str, _Member] = {}
        self._changed = asyncio.Event()
        self._could_move_kv: bool | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all peers that may get requests, in the order in which they came."""
        return tuple(member.peer.address for member in self._members())

    @property
    def can_move_kv(self) -> bool:
        """Whether at least one peer has a valid handshake."""
        return any(member.peer.state is PeerState.READY for member in self._members())

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that some peer takes; None as long as a peer has never said."""
        told = [member.peer.max_prompt_tokens for member in self._members()]
        known = [tokens for tokens in told if tokens is not None]
        return max(known) if known and len(known) == len(told) else None

    def configure(self, addresses: Sequence[str]) -> None:
        """Have exactly these peers from now on, and keep each of them ready."""
        for address, member in self._all.items():
            if address not in addresses and not member.is_leaving:
                self._remove(member)
        for address in addresses:
            if address not in self._all or self._all[address].is_leaving:
                self._add(address)
        self.peer_changed()

    async def stop(self) -> None:
        """End the tasks of the peers and close their channels."""
        tasks = [member.task for member in self._all.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)
        for member in self._all.values():
            await member.peer.close()
        self._all.clear()

    def peer_changed(self) -> None:
        """Take note that a peer's state, its breaker or its quarantine has changed."""
        for member in self._members():
            self._note_incarnation(member)
        self._changed.set()
        self._changed = asyncio.Event()
        if self.can_move_kv != self._could_move_kv:
            self._could_move_kv = self.can_move_kv
            self._on_can_move_kv(self.can_move_kv)

    async def choose(self, num_prompt_tokens: int) -> ChosenPeer:
        """Return the best usable peer, waiting for one if one may become usable in time.

        Raises:
            PrefillUnavailableError: None became usable; it says when to try again.
        """
        chosen = await self._wait_for(lambda: self._best(num_prompt_tokens), self._wait_s)
        if chosen is not None:
            return chosen
        pause_s = min(self._breaker_waits_s(), default=0.0)
        raise PrefillUnavailableError(
            f"no usable prefill service within {self._wait_s:g} s: {self._describe()}",
            retry_after_s=max(_DEFAULT_RETRY_AFTER_S, pause_s),
        )

    async def choose_again(
        self, num_prompt_tokens: int, *, failed: ChosenPeer, retry: Retry
    ) -> ChosenPeer | None:
        """Return a usable peer for a second attempt; None when there is none in time.

        Another process is preferred; the one that failed is taken only if `retry` allows it. A
        process that was started anew at the same address is another one.
        """
        other_than = failed.session.prefill_incarnation

        def best() -> ChosenPeer | None:
            chosen = self._best(num_prompt_tokens, other_than=other_than)
            if chosen is None and retry is Retry.ANYWHERE:
                chosen = self._best(num_prompt_tokens)
            return chosen

        has_others = any(address != failed.peer.address for address in self.addresses)
        may_wait = has_others or retry is Retry.ANYWHERE
        wait_s = min(self._wait_s, _RETRY_WAIT_S[retry]) if may_wait else 0.0
        return await self._wait_for(best, wait_s)

    @contextlib.contextmanager
    def attempt(self, chosen: ChosenPeer, num_prompt_tokens: int) -> Iterator[Trial]:
        """Count a request's prompt as pending at the peer while the block runs.

        Enter it right after the choice, with no wait between: a breaker that is not closed lets one
        request through. The trial is the caller's, who must end it.
        """
        member = self._all[chosen.peer.address]
        trial = member.breaker.begin()
        member.num_attempts += 1
        chosen.peer.num_pending_tokens += num_prompt_tokens
        try:
            yield trial
        finally:
            member.num_attempts -= 1
            chosen.peer.num_pending_tokens -= num_prompt_tokens

    def _members(self) -> list[_Member]:
        return [member for member in self._all.values() if not member.is_leaving]

    def _best(self, num_prompt_tokens: int, *, other_than: str = "") -> ChosenPeer | None:
        usable = [
            ChosenPeer(peer=member.peer, session=member.peer.session)
            for member in self._members()
            if member.peer.session is not None
            and member.peer.session.prefill_incarnation != other_than
            and member.peer.session.max_prompt_tokens >= num_prompt_tokens
            and member.breaker.lets_through
            and self._num_quarantined_blocks(member.peer.address) < self._max_quarantined_blocks
        ]
        return min(usable, key=lambda one: one.peer.num_pending_tokens, default=None)

    async def _wait_for(
        self, best: Callable[[], ChosenPeer | None], wait_s: float
    ) -> ChosenPeer | None:
        """Return the choice as soon as there is one; None when none can come within `wait_s`."""
        deadline_s = self._clock() + wait_s
        while (chosen := best()) is None:
            left_s = deadline_s - self._clock()
            pauses_s = self._breaker_waits_s()
            if left_s <= 0 or min(pauses_s, default=left_s) >= left_s:
                return None
            # The end of a breaker's pause is told by nobody.
            next_s = min([left_s, *(pause_s for pause_s in pauses_s if pause_s > 0)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next_s):
                    await self._changed.wait()
        return chosen

    def _breaker_waits_s(self) -> list[float]:
        """Seconds until each peer's breaker lets a request through."""
        return [member.breaker.wait_s for member in self._members()]

    def _add(self, address: str) -> None:
        member = self._all.get(address)
        if member is None:
            breaker = CircuitBreaker(
                self._breaker, clock=self._clock, on_transition=self._breaker_observer(address)
            )
            peer = self._make_peer(address)
            member = _Member(peer=peer, breaker=breaker, task=asyncio.create_task(peer.run()))
            self._all[address] = member
        else:
            # One peer per address at any time: its region and its quarantine go by the address.
            member.is_leaving = False
            member.task.cancel()
            member.task = asyncio.create_task(member.peer.run())
        member.task.add_done_callback(_report)
        self._metrics.prefill_breaker(address, _GAUGE_OF_BREAKER[member.breaker.state])
        logger.info("prefill=%s added", address)

    def _remove(self, member: _Member) -> None:
        peer = member.peer
        member.is_leaving = True
        member.task.cancel()
        if peer.session is not None:
            peer.invalidate(peer.session, "it was removed from the configuration")
        member.task = asyncio.create_task(self._close_when_quiet(member))
        member.task.add_done_callback(_report)
        self._metrics.forget_prefill(peer.address)
        logger.info("prefill=%s removed; what runs there may finish", peer.address)

    async def _close_when_quiet(self, member: _Member) -> None:
        peer = member.peer
        while member.num_attempts > 0 or self._num_ending_tickets(peer.address) > 0:
            # Not every end of a ticket is told.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_CHECK_INTERVAL_S):
                    await self._changed.wait()
        del self._all[peer.address]
        await peer.close()
        logger.info("prefill=%s closed", peer.address)

    def _note_incarnation(self, member: _Member) -> None:
        session = member.peer.session
        if session is not None and session.prefill_incarnation != member.incarnation:
            is_first = not member.incarnation
            member.incarnation = session.prefill_incarnation
            if not is_first:
                member.breaker.process_replaced()

    def _breaker_observer(self, address: str) -> Callable[[BreakerState, str], None]:
        def observe(state: BreakerState, cause: str) -> None:
            level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
            logger.log(level, "prefill=%s breaker=%s: %s", address, state.value, cause)
            self._metrics.prefill_breaker(address, _GAUGE_OF_BREAKER[state])
            self.peer_changed()

        return observe

    def _describe(self) -> str:
        described = ", ".join(
            f"{member.peer.address} is {member.peer.state.value} "
            f"({self._num_quarantined_blocks(member.peer.address)} blocks quarantined, "
            f"breaker {member.breaker.state.value})"
            for member in self._members()
        )
        return described or "none is configured"


def _report(task: "asyncio.Task[None]") -> None:
    """A peer's task ends by itself only after the peer left; an error is a mistake of ours."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a prefill peer is not watched any more", exc_info=error)
