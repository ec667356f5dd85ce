"""The decode services that may have KV pushed to them: one session per handshake.

    connect -> ACTIVE -> RETIRED -> closed

A new handshake of the same decode incarnation retires the session before it; a decode service
that died, and the end of this process, retire theirs. A retired session takes no new job, and is
closed when its last job has ended, because until then its link may be in use.
Owned by the event loop thread; whatever blocks runs on the executor.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kv_transfer.engine.base import TargetDescriptor, TransferEngine, WriterLink
from kv_transfer.errors import ConnectError, EngineError
from kv_transfer.layout import RegionMap, StagingMap
from prefill_service.kv_push import SessionPusher
from serving_core.errors import (
    InvalidRequestError,
    OverloadedError,
    PrefillUnavailableError,
    SessionUnknownError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A decode service that has been found compatible.

    Attributes:
        decode_incarnation: New at each start of the decode process.
        descriptor: Where its KV memory is; holds a secret.
        region: How its KV memory, or its staging ring, is laid out.
    """

    decode_incarnation: str
    descriptor: TargetDescriptor = field(repr=False)
    region: RegionMap | StagingMap


class DecodeSession:
    """An agreement with one decode service and the link to its memory."""

    def __init__(
        self,
        *,
        session_id: str,
        peer: Peer,
        target_block_size: int,
        pusher: SessionPusher,
        on_unused: Callable[["DecodeSession"], None],
    ) -> None:
        """Make an active session; `on_unused` is called when it is retired and has no job."""
        self.session_id = session_id
        self.decode_incarnation = peer.decode_incarnation
        self.num_target_blocks = peer.region.num_blocks
        self.target_block_size = target_block_size
        self.pusher = pusher
        self._on_unused = on_unused
        self._num_jobs = 0
        self._is_retired = False

    def enter(self) -> None:
        """Count a job that uses the session."""
        self._num_jobs += 1

    def leave(self) -> None:
        """Uncount a job that has ended."""
        self._num_jobs -= 1
        if self._is_retired and self._num_jobs == 0:
            self._on_unused(self)

    def retire(self) -> None:
        """Take no new job, and be closed as soon as no job is left. Idempotent."""
        if not self._is_retired:
            self._is_retired = True
            if self._num_jobs == 0:
                self._on_unused(self)


class SessionTable:
    """All sessions, at most one active per decode incarnation."""

    def __init__(
        self,
        *,
        engine: TransferEngine,
        prefill_incarnation: str,
        make_pusher: Callable[[WriterLink, RegionMap | StagingMap], SessionPusher],
        on_dead: Callable[[DecodeSession, str], None],
        executor: Executor,
        block_size: int,
        max_num_sessions: int,
        connect_timeout_s: float,
    ) -> None:
        """Take the collaborators.

        Args:
            engine: How to reach the memory of a decode service.
            prefill_incarnation: Of this process.
            make_pusher: Builds what pushes over a link into a region.
            on_dead: Is told of a session whose decode service died.
            executor: Where blocking calls run.
            block_size: Token rows per block on both sides.
            max_num_sessions: Most active sessions.
            connect_timeout_s: Longest time to connect to a memory.
        """
        self._engine = engine
        self._prefill_incarnation = prefill_incarnation
        self._make_pusher = make_pusher
        self._on_dead = on_dead
        self._executor = executor
        self._block_size = block_size
        self._max_num_sessions = max_num_sessions
        self._connect_timeout_s = connect_timeout_s
        self._active: dict[str, DecodeSession] = {}  # by decode incarnation
        self._num_connecting = 0
        self._closing: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Return the number of active sessions."""
        return len(self._active)

    def get(self, session_id: str) -> DecodeSession:
        """Return an active session.

        Raises:
            SessionUnknownError: There is none of that id: decode must shake hands again.
        """
        for session in self._active.values():
            if session.session_id == session_id:
                return session
        raise SessionUnknownError(session_id)

    async def open(self, peer: Peer) -> DecodeSession:
        """Connect to the peer's memory and make a session, in place of an earlier one.

        Raises:
            OverloadedError: Too many decode services are connected.
            PrefillUnavailableError: The memory cannot be reached in time.
            InvalidRequestError: The engine refuses the connection.
        """
        num_taken = len(self._active.keys() - {peer.decode_incarnation}) + self._num_connecting
        if num_taken >= self._max_num_sessions:
            raise OverloadedError(
                f"{num_taken} decode services are connected or connecting, the limit is "
                f"{self._max_num_sessions}",
                retry_after_s=self._connect_timeout_s,
            )
        self._num_connecting += 1
        try:
            link = await self._connect(peer)
        finally:
            self._num_connecting -= 1
        session = DecodeSession(
            session_id=secrets.token_hex(16),
            peer=peer,
            target_block_size=self._block_size,
            pusher=self._make_pusher(link, peer.region),
            on_unused=self._close,
        )
        if (earlier := self._active.pop(peer.decode_incarnation, None)) is not None:
            earlier.retire()
        self._active[peer.decode_incarnation] = session
        logger.info("session_id=%s decode=%s opened", session.session_id, peer.decode_incarnation)
        return session

    def reap_dead(self) -> None:
        """Retire the sessions of decode services that died."""
        for incarnation, session in list(self._active.items()):
            if session.pusher.peer_is_dead():
                del self._active[incarnation]
                logger.warning("session_id=%s decode=%s died", session.session_id, incarnation)
                session.retire()
                self._on_dead(session, f"decode {incarnation} died")

    async def close(self, timeout_s: float) -> None:
        """Retire all sessions and wait until the unused ones are closed."""
        for session in self._active.values():
            session.retire()
        self._active.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout_s)

    async def _connect(self, peer: Peer) -> WriterLink:
        loop = asyncio.get_running_loop()
        connecting = loop.run_in_executor(
            self._executor,
            self._engine.connect,
            peer.descriptor,
            self._prefill_incarnation,
            self._connect_timeout_s,
        )
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await asyncio.shield(connecting)
        except TimeoutError as error:
            connecting.add_done_callback(self._discard)
            raise PrefillUnavailableError(
                f"decode's memory was not reached within {self._connect_timeout_s} s"
            ) from error
        except asyncio.CancelledError:
            connecting.add_done_callback(self._discard)
            raise
        except EngineError as error:
            if isinstance(error, ConnectError) and error.retryable:
                raise PrefillUnavailableError(f"decode's memory: {error}") from error
            raise InvalidRequestError("region", "refused", f"reachable: {error}") from error

    def _discard(self, connecting: "asyncio.Future[WriterLink]") -> None:
        """Close a link that came after its caller had gone."""
        if connecting.cancelled():
            return
        if (error := connecting.exception()) is not None:
            logger.info("late connection failed: %s", error)
            return
        self._executor.submit(connecting.result().close)

    def _close(self, session: DecodeSession) -> None:
        """Close an unused session on the executor, which may wait for its push threads."""
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._executor, session.pusher.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: "asyncio.Future[None]") -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.error("a session did not close", exc_info=error)
