"""The prefill services of the configuration, and the choice among them. Event loop thread only.

A request goes to the usable peer with the fewest prompt tokens that are still to be computed
there. A peer is usable with a valid handshake and with fewer quarantined blocks than the cap:
blocks that its dead or silent writers hold must not eat up the pool.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from decode_service.prefill_peer import PeerState, PrefillPeer, PrefillSession
from serving_core.errors import PrefillUnavailableError

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPeer:
    """A peer together with the handshake under which it was chosen."""

    peer: PrefillPeer
    session: PrefillSession


class PrefillPool:
    """All peers. `on_can_move_kv` is told whenever the answer to `can_move_kv` changes."""

    def __init__(
        self,
        *,
        num_quarantined_blocks: Callable[[str], int],
        max_quarantined_blocks: int,
        wait_s: float,
        on_can_move_kv: Callable[[bool], None],
    ) -> None:
        """Start without peers.

        Args:
            num_quarantined_blocks: Tells how many blocks the writers of an address hold.
            max_quarantined_blocks: Quarantined blocks from which on a peer gets no request.
            wait_s: Longest wait for a usable peer.
            on_can_move_kv: Told the first answer, and each change of it.
        """
        self._num_quarantined_blocks = num_quarantined_blocks
        self._max_quarantined_blocks = max_quarantined_blocks
        self._wait_s = wait_s
        self._on_can_move_kv = on_can_move_kv
        self._peers: list[PrefillPeer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._could_move_kv: bool | None = None

    @property
    def peers(self) -> Sequence[PrefillPeer]:
        """All of them, in the order of the configuration."""
        return tuple(self._peers)

    @property
    def can_move_kv(self) -> bool:
        """Whether at least one peer has a valid handshake."""
        return any(peer.state is PeerState.READY for peer in self._peers)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that some peer takes; None as long as a peer has never said."""
        told = [peer.max_prompt_tokens for peer in self._peers]
        known = [tokens for tokens in told if tokens is not None]
        return max(known) if known and len(known) == len(told) else None

    def start(self, peers: Sequence[PrefillPeer]) -> None:
        """Take the peers and keep each of them ready from now on."""
        self._peers = list(peers)
        self.peer_changed()
        self._tasks = [asyncio.create_task(peer.run()) for peer in peers]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """End the tasks of the peers."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        self._tasks.clear()

    def peer_changed(self) -> None:
        """Take note that a peer's state or its quarantine has changed."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self.can_move_kv != self._could_move_kv:
            self._could_move_kv = self.can_move_kv
            self._on_can_move_kv(self.can_move_kv)

    async def choose(self, num_prompt_tokens: int) -> ChosenPeer:
        """Return the best usable peer, waiting for one if there is none now.

        Raises:
            PrefillUnavailableError: None became usable in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while (chosen := self._best(num_prompt_tokens)) is None:
                    await self._changed.wait()
                return chosen
        raise PrefillUnavailableError(
            f"no usable prefill service within {self._wait_s:g} s: {self._describe()}"
        )

    @contextlib.contextmanager
    def pending(self, peer: PrefillPeer, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request's prompt as pending at the peer while the block runs."""
        peer.num_pending_tokens += num_prompt_tokens
        try:
            yield
        finally:
            peer.num_pending_tokens -= num_prompt_tokens

    def _best(self, num_prompt_tokens: int) -> ChosenPeer | None:
        usable = [
            ChosenPeer(peer=peer, session=peer.session)
            for peer in self._peers
            if peer.session is not None
            and peer.session.max_prompt_tokens >= num_prompt_tokens
            and self._num_quarantined_blocks(peer.address) < self._max_quarantined_blocks
        ]
        return min(usable, key=lambda one: one.peer.num_pending_tokens, default=None)

    def _describe(self) -> str:
        return ", ".join(
            f"{peer.address} is {peer.state.value} "
            f"({self._num_quarantined_blocks(peer.address)} blocks quarantined)"
            for peer in self._peers
        )


def _report(task: "asyncio.Task[None]") -> None:
    """A peer's task ends by being cancelled only; anything else is a mistake of ours."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a prefill peer is not watched any more", exc_info=error)
