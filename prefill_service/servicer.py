"""The RPCs of tandem.v1.PrefillService: reads messages, checks them, and hands them to the jobs.

Whatever is wrong before Admitted ends the stream with a gRPC status; whatever goes wrong after it
is told by Failed, because then the status of the stream would come before the proof that no write
can happen any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from kv_transfer.layout import KvLayout
from prefill_service.job import PrefillJob
from prefill_service.jobs import JobCoordinator
from prefill_service.sessions import SessionTable
from prefill_service.validation import PromptLimits, parse_handshake, parse_start
from serving_core.block_pool import BlockPool
from serving_core.errors import DeadlineError, InvalidRequestError
from serving_core.rpc import wire
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

PROTOCOL_VERSION = 1
# Decode takes a silence of several intervals for a stopped process.
HEARTBEAT_INTERVAL_S = 0.5
# How long a stream stays open after its last message, for decode to close its side first.
LINGER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this service tells its callers about itself.

    Attributes:
        prefill_incarnation: New at each start of this process.
        layout: Layout of the KV on this side.
        engine_name: The transfer engine with which it pushes.
        can_fence_writer: Whether that engine may write into blocks.
        limits: Limits of a prompt.
    """

    prefill_incarnation: str
    layout: KvLayout
    engine_name: str
    can_fence_writer: bool
    limits: PromptLimits


class PrefillServicer(pb_grpc.PrefillServiceServicer):
    """Translates between the wire and the jobs."""

    def __init__(
        self,
        *,
        identity: Identity,
        sessions: SessionTable,
        jobs: JobCoordinator,
        pool: BlockPool,
        start_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        """Take the collaborators.

        Args:
            identity: What callers are told.
            sessions: Agreements with decode services.
            jobs: All jobs.
            pool: The own blocks, to be counted.
            start_timeout_s: Longest wait for the first message of a stream.
            write_timeout_s: Longest time until a peer takes one message.
        """
        self._identity = identity
        self._sessions = sessions
        self._jobs = jobs
        self._pool = pool
        self._start_timeout_s = start_timeout_s
        self._write_timeout_s = write_timeout_s

    async def Handshake(
        self,
        request: pb.HandshakeRequest,
        context: grpc.aio.ServicerContext[pb.HandshakeRequest, pb.HandshakeResponse],
    ) -> pb.HandshakeResponse:
        """Agree on the KV layout and open a session."""
        self._jobs.check_accepting()
        peer = parse_handshake(
            request,
            protocol_version=PROTOCOL_VERSION,
            layout=self._identity.layout,
            engine_name=self._identity.engine_name,
            can_fence_writer=self._identity.can_fence_writer,
        )
        session = await self._sessions.open(peer)
        return pb.HandshakeResponse(
            session_id=session.session_id,
            prefill_incarnation=self._identity.prefill_incarnation,
            layout=wire.layout_to_proto(self._identity.layout),
            max_prompt_tokens=self._identity.limits.max_prompt_tokens,
        )

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse],
    ) -> None:
        """Carry one request from Start to its end."""
        start = await self._read_start(request_iterator)
        session = self._sessions.get(start.session_id)
        job = self._jobs.admit(parse_start(start, limits=self._identity.limits), session)
        reader = asyncio.create_task(self._read(request_iterator, job))
        try:
            while (message := await self._next_message(job)) is not None:
                async with asyncio.timeout(self._write_timeout_s):
                    await context.write(message)
            # Decode may still be writing. To end the stream under a write would fail the call
            # there, together with the messages that it has not read yet.
            await asyncio.wait((reader,), timeout=LINGER_S)
        except TimeoutError as error:
            raise DeadlineError(f"decode took no message for {self._write_timeout_s} s") from error
        finally:
            self._jobs.revoke(job, "the stream ended")
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _next_message(self, job: PrefillJob) -> pb.PrefillResponse | None:
        """Wait for the job's next message; a heartbeat when there is none for a while."""
        try:
            async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                return await job.outbox.next_message()
        except TimeoutError:
            return pb.PrefillResponse(heartbeat=pb.Heartbeat())

    async def Revoke(
        self,
        request: pb.RevokeRequest,
        context: grpc.aio.ServicerContext[pb.RevokeRequest, pb.RevokeResponse],
    ) -> pb.RevokeResponse:
        """Answer when no write of the ticket can happen any more."""
        wire.check_ticket_id(request.ticket_id)
        await self._jobs.revoke_ticket(request.ticket_id, request.cause)
        return pb.RevokeResponse(prefill_incarnation=self._identity.prefill_incarnation)

    async def GetPoolStatus(
        self,
        request: pb.GetPoolStatusRequest,
        context: grpc.aio.ServicerContext[pb.GetPoolStatusRequest, pb.GetPoolStatusResponse],
    ) -> pb.GetPoolStatusResponse:
        """Count blocks and jobs."""
        return pb.GetPoolStatusResponse(
            num_blocks=self._pool.num_total,
            num_free_blocks=self._pool.num_free,
            num_evictable_blocks=self._pool.num_evictable,
            num_queued_jobs=self._jobs.num_queued,
            num_active_jobs=self._jobs.num_active,
            num_pushed_bytes=self._jobs.num_pushed_bytes,
            prefill_incarnation=self._identity.prefill_incarnation,
        )

    async def _read_start(self, requests: AsyncIterator[pb.PrefillRequest]) -> pb.Start:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                request = await anext(requests)
        except TimeoutError as error:
            raise DeadlineError(f"no Start within {self._start_timeout_s} s") from error
        except StopAsyncIteration as error:
            raise InvalidRequestError("message", "none", "Start as first message") from error
        kind = request.WhichOneof("message")
        if kind != "start":
            raise InvalidRequestError("message", kind, "Start as first message")
        return request.start

    async def _read(self, requests: AsyncIterator[pb.PrefillRequest], job: PrefillJob) -> None:
        """Obey the messages after Start; the end of the stream revokes what is not done."""
        try:
            async for request in requests:
                self._obey(request, job)
        finally:
            self._jobs.revoke(job, "decode closed the stream")

    def _obey(self, request: pb.PrefillRequest, job: PrefillJob) -> None:
        kind = request.WhichOneof("message")
        if kind == "grant":
            try:
                ticket = wire.ticket_from_proto(request.grant.ticket)
            except InvalidRequestError as error:
                reason = errors_pb2.FAILURE_REASON_TICKET_REJECTED
                self._jobs.fail(job, reason, str(error))
            else:
                self._jobs.grant(job, ticket)
        elif kind == "renew":
            self._jobs.renew(job, request.renew.ticket_id)
        elif kind == "revoke":
            self._jobs.revoke(job, request.revoke.cause)
        elif kind == "slots_freed":
            self._jobs.free_slots(job, request.slots_freed.ticket_id, request.slots_freed.slots)
        else:
            reason = errors_pb2.FAILURE_REASON_INVALID_REQUEST
            limit = "grant, renew, revoke or slots_freed"
            self._jobs.fail(job, reason, f"message is {kind}, must be {limit}")
