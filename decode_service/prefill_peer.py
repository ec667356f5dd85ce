"""One prefill service as seen from here: its channel, its handshake and its health.

    CONNECTING --handshake--> READY --connection lost, silent, session unknown--> CONNECTING
         |
         +--layouts differ--> MISMATCHED --tried again at leisure--> CONNECTING

A task of its own keeps each peer in READY as long as it can. Owned by the event loop thread.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import grpc

from decode_service.landing import Landing, Landings
from decode_service.prefill_errors import error_from_rpc
from kv_transfer.errors import KvTransferError
from kv_transfer.layout import KvLayout, compare
from serving_core.errors import LayoutMismatchError, PrefillUnavailableError, TandemError
from serving_core.rpc import wire
from tandem.v1 import prefill_service_pb2 as pb
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 0.5
_PROBE_INTERVAL_S = 1.0
_CLOSE_GRACE_S = 1.0


class PeerState(Enum):
    """Whether a peer can take requests; CONNECTING also stands for a lost connection."""

    CONNECTING = "connecting"
    READY = "ready"
    MISMATCHED = "mismatched"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSession:
    """A valid handshake.

    Attributes:
        session_id: Names it in Start.
        prefill_incarnation: The process that agreed.
        max_prompt_tokens: Longest prompt that fits its empty pool.
        landing: Where it pushes.
    """

    session_id: str
    prefill_incarnation: str
    max_prompt_tokens: int
    landing: Landing


class PrefillPeer:
    """A configured prefill service."""

    def __init__(
        self,
        *,
        address: str,
        channel: grpc.aio.Channel,
        handshake: pb.HandshakeRequest,
        landings: Landings,
        layout: KvLayout,
        probe_timeout_s: float,
        on_change: Callable[["PrefillPeer"], None],
        on_handshake: Callable[[str], None],
    ) -> None:
        """Take the collaborators; `run` does the work.

        Args:
            address: host:port from the configuration, for messages.
            channel: To that address; `close` closes it.
            handshake: What is sent at each attempt, but for the region.
            landings: Makes the place where it pushes, one for each valid handshake.
            layout: Layout of our KV.
            probe_timeout_s: Longest time without an answer before it counts as stopped.
            on_change: Called after each change of state.
            on_handshake: Told the outcome of each handshake: ok, mismatch or failed.
        """
        self.address = address
        self.stub = pb_grpc.PrefillServiceStub(channel)
        self.num_pending_tokens = 0
        self._channel = channel
        self._handshake = handshake
        self._landings = landings
        self._landing: Landing | None = None
        self._layout = layout
        self._probe_timeout_s = probe_timeout_s
        self._on_change = on_change
        self._on_handshake = on_handshake
        self._state = PeerState.CONNECTING
        self._session: PrefillSession | None = None
        self._max_prompt_tokens: int | None = None
        self._last_problem = ""
        self._lost = asyncio.Event()

    @property
    def state(self) -> PeerState:
        """Where it is in its life."""
        return self._state

    @property
    def session(self) -> PrefillSession | None:
        """The valid handshake; None unless READY."""
        return self._session

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt it has ever said to take; None before the first handshake."""
        return self._max_prompt_tokens

    def invalidate(self, session: PrefillSession, cause: str) -> None:
        """Drop a session that proved unusable, unless a newer one is there already."""
        if self._session is session:
            self._session = None
            self._note_problem(cause)
            self._become(PeerState.CONNECTING)
            self._lost.set()

    async def run(self) -> None:
        """Keep the peer ready until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            if (session := await self._shake_hands()) is not None:
                backoff_s = _FIRST_BACKOFF_S
                try:
                    await self._watch(session)
                finally:
                    self._landing = None
                    await session.landing.retire()
            else:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def close(self) -> None:
        """Close the channel; calls that still end may do so. `run` is not running."""
        if self._landing is not None:
            await self._landing.retire()
        await self._channel.close(_CLOSE_GRACE_S)

    async def _shake_hands(self) -> PrefillSession | None:
        try:
            # Kept until a handshake succeeds with it: to make one may start a process.
            if self._landing is None:
                self._landing = await self._landings.open()
            landing = self._landing
            request = pb.HandshakeRequest(region=landing.region)
            request.MergeFrom(self._handshake)
            reply = await self.stub.Handshake(
                request, timeout=_HANDSHAKE_TIMEOUT_S, wait_for_ready=False
            )
            self._check_layout(reply)
        except KvTransferError as error:
            self._refuse(PrefillUnavailableError(f"no memory to push to: {error}"))
            return None
        except grpc.aio.AioRpcError as error:
            self._refuse(error_from_rpc(error))
            return None
        except TandemError as error:
            self._refuse(error)
            return None
        session = self._session = PrefillSession(
            session_id=reply.session_id,
            prefill_incarnation=reply.prefill_incarnation,
            max_prompt_tokens=reply.max_prompt_tokens,
            landing=landing,
        )
        self._max_prompt_tokens = reply.max_prompt_tokens
        self._last_problem = ""
        self._lost.clear()
        logger.info("prefill=%s incarnation=%s ready", self.address, reply.prefill_incarnation)
        self._on_handshake("ok")
        self._become(PeerState.READY)
        return session

    def _check_layout(self, reply: pb.HandshakeResponse) -> None:
        """Check the peer's word ourselves: it may be newer or older than we are.

        Raises:
            LayoutMismatchError: Names the first field that differs.
            InvalidRequestError: The reply cannot be read.
        """
        for mismatch in compare(self._layout, wire.layout_from_proto(reply.layout)):
            raise LayoutMismatchError(mismatch.field, mismatch.ours, mismatch.theirs)

    def _refuse(self, error: TandemError) -> None:
        self._note_problem(f"{type(error).__name__}: {error}")
        is_mismatch = isinstance(error, LayoutMismatchError)
        self._on_handshake("mismatch" if is_mismatch else "failed")
        self._become(PeerState.MISMATCHED if is_mismatch else PeerState.CONNECTING)

    async def _watch(self, session: PrefillSession) -> None:
        """Return when the session is lost; it outlives no connection and no process."""
        tasks = (
            asyncio.create_task(self._connection_lost(session)),
            asyncio.create_task(self._stops_answering(session)),
            asyncio.create_task(self._lost.wait()),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # Not awaited one by one: their CancelledError could not be told from our own.
            await asyncio.wait(tasks)

    async def _connection_lost(self, session: PrefillSession) -> None:
        state = self._channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state()
        self.invalidate(session, "the connection was lost")

    async def _stops_answering(self, session: PrefillSession) -> None:
        """Ask now and then: a stopped process keeps its connection, and a new one may take it."""
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            try:
                reply = await self.stub.GetPoolStatus(
                    pb.GetPoolStatusRequest(), timeout=self._probe_timeout_s
                )
            except grpc.aio.AioRpcError as error:
                self.invalidate(session, f"no answer: {error.code().name}")
                return
            if reply.prefill_incarnation != session.prefill_incarnation:
                self.invalidate(session, "another process answers at its address")
                return

    def _note_problem(self, problem: str) -> None:
        """Log a problem once, however often it is met in a row."""
        if problem != self._last_problem:
            logger.warning("prefill=%s unusable: %s", self.address, problem)
        self._last_problem = problem

    def _become(self, state: PeerState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(self)
