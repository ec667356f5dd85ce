"""A prefill service over real gRPC that follows a script, and really writes KV through an engine.

It computes nothing: the rows it writes are random numbers that depend on the prompt only, and the
first token is always `FIRST_TOKEN`. Good for every question about the hand-off itself.
"""

# ruff: noqa: N802 - the names of RPCs are the protocol's

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc
import numpy as np

from kv_transfer.engine.base import TransferEngine, WriterLink
from kv_transfer.layout import KvLayout, RegionMap, placements
from kv_transfer.spans import Placement, RowRange, copy_spans
from kv_transfer.ticket import Receipt, Ticket
from serving_core.errors import (
    LayoutMismatchError,
    OverloadedError,
    SessionUnknownError,
    TandemError,
)
from serving_core.rpc import wire
from serving_core.rpc.status import to_rpc_status
from tandem.v1 import errors_pb2, handoff_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

FIRST_TOKEN = 5
MAX_PROMPT_TOKENS = 200


class Act(Enum):
    """How one Prefill call goes."""

    COMPLETE = auto()
    REFUSE_AS_OVERLOADED = auto()
    FORGET_SESSION = auto()
    STAY_QUEUED = auto()
    STALL_AFTER_HALF = auto()
    BREAK_AFTER_HALF = auto()
    FAIL_AFTER_HALF = auto()
    FAIL_TO_COMPUTE = auto()
    END_AFTER_HALF = auto()
    SEND_WRONG_DIGEST = auto()
    SEND_WRONG_MAC = auto()
    SEND_A_RECEIPT_TWICE = auto()


@dataclass(kw_only=True)
class Session:
    """A handshake."""

    layout: KvLayout
    region: RegionMap
    link: WriterLink


class ScriptedPrefill(pb_grpc.PrefillServiceServicer):
    """One prefill process, as far as decode can tell."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.incarnation = f"prefill-{secrets.token_hex(4)}"
        self.acts: deque[Act] = deque()
        self.answers_revokes = True
        self.changes_fingerprint = False
        self.hangs = False
        self.num_handshakes = 0
        self.starts: list[pb.Start] = []
        self.tickets: list[Ticket] = []
        self.num_renewals = 0
        self.num_open_calls = 0
        self.address = ""
        self._sessions: dict[str, Session] = {}
        self._server: Any = None

    async def start(self, port: int = 0) -> None:
        """Serve on a port of loopback."""
        # Decode pings every second, which a server takes for an attack unless told otherwise.
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(options=options)
        pb_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        """End every call and the server."""
        await self._server.stop(0)

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeResponse:
        """Accept any layout, or complain about the fingerprint."""
        await self._hang()
        self.num_handshakes += 1
        if self.changes_fingerprint:
            theirs = request.layout.model_fingerprint
            await refuse(context, LayoutMismatchError("model_fingerprint", "another", theirs))
        region, descriptor = wire.region_from_proto(request.region)
        session = Session(
            layout=wire.layout_from_proto(request.layout),
            region=region,
            link=self.engine.connect(descriptor, self.incarnation, 1.0),
        )
        session_id = secrets.token_hex(4)
        self._sessions[session_id] = session
        return pb.HandshakeResponse(
            session_id=session_id,
            prefill_incarnation=self.incarnation,
            layout=request.layout,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
        )

    async def Prefill(
        self, request_iterator: AsyncIterator[pb.PrefillRequest], context: Any
    ) -> None:
        """Follow the next act."""
        self.num_open_calls += 1
        try:
            await self._follow(request_iterator, context)
        finally:
            self.num_open_calls -= 1

    async def _follow(self, requests: AsyncIterator[pb.PrefillRequest], context: Any) -> None:
        start = (await anext(requests)).start
        self.starts.append(start)
        act = self.acts.popleft() if self.acts else Act.COMPLETE
        if act is Act.REFUSE_AS_OVERLOADED:
            await refuse(context, OverloadedError("planned", retry_after_s=2.5))
        if act is Act.FORGET_SESSION:
            self._sessions.clear()
        session = self._sessions.get(start.session_id)
        if session is None:
            await refuse(context, SessionUnknownError(start.session_id))
            raise AssertionError("unreachable")
        await context.write(pb.PrefillResponse(admitted=pb.Admitted()))
        if act is Act.STAY_QUEUED:
            await self._until_revoked(requests, context, b"")
            return
        await context.write(pb.PrefillResponse(starting_soon=pb.StartingSoon()))
        request = await anext(requests, None)
        if request is None or not request.HasField("grant"):
            await context.write(pb.PrefillResponse(drained=pb.Drained()))
            return
        ticket = wire.ticket_from_proto(request.grant.ticket)
        self.tickets.append(ticket)
        receipts = list(self._write(session, start.prompt_token_ids, ticket))
        await self._push(act, receipts, ticket, requests, context)

    async def _push(
        self,
        act: Act,
        receipts: list[handoff_pb2.Receipt],
        ticket: Ticket,
        requests: AsyncIterator[pb.PrefillRequest],
        context: Any,
    ) -> None:
        half = len(receipts) // 2
        await send_receipts(context, receipts[:half])
        first = pb.First(token_ids=[FIRST_TOKEN], num_cached_tokens=3)
        match act:
            case Act.STALL_AFTER_HALF:
                await self._until_revoked(requests, context, ticket.id)
                return
            case Act.BREAK_AFTER_HALF:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "planned break")
            case Act.FAIL_AFTER_HALF:
                await fail(context, errors_pb2.FAILURE_REASON_WRITE_FAILED)
                return
            case Act.FAIL_TO_COMPUTE:
                await fail(context, errors_pb2.FAILURE_REASON_COMPUTE_FAILED)
                return
            case Act.END_AFTER_HALF:
                return
            case Act.SEND_WRONG_DIGEST:
                receipts[half].digest ^= 1
            case Act.SEND_WRONG_MAC:
                receipts[half].ticket_mac = bytes(len(ticket.mac))
            case Act.SEND_A_RECEIPT_TWICE:
                receipts[half] = receipts[0]
            case _:
                pass
        await send_receipts(context, receipts[half:])
        await context.write(pb.PrefillResponse(first=first))
        if act is not Act.COMPLETE:
            await self._until_revoked(requests, context, ticket.id)

    async def _until_revoked(
        self, requests: AsyncIterator[pb.PrefillRequest], context: Any, ticket_id: bytes
    ) -> None:
        async for request in requests:
            if request.HasField("renew"):
                self.num_renewals += 1
            if request.HasField("revoke") and self.answers_revokes:
                await context.write(pb.PrefillResponse(drained=pb.Drained(ticket_id=ticket_id)))
                return

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.RevokeResponse:
        """Answer at once: this process writes nothing in the background."""
        if not self.answers_revokes:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "planned silence")
        return pb.RevokeResponse(prefill_incarnation=self.incarnation)

    async def GetPoolStatus(
        self, request: pb.GetPoolStatusRequest, context: Any
    ) -> pb.GetPoolStatusResponse:
        """Say who answers, unless the script has it hang."""
        await self._hang()
        return pb.GetPoolStatusResponse(prefill_incarnation=self.incarnation)

    async def _hang(self) -> None:
        while self.hangs:  # noqa: ASYNC110 - the test flips the switch
            await asyncio.sleep(0.01)

    def _write(
        self, session: Session, prompt_token_ids: Sequence[int], ticket: Ticket
    ) -> Iterator[handoff_pb2.Receipt]:
        """Write two receipts' worth of rows per component, whose numbers follow from the prompt."""
        generator = np.random.default_rng(list(prompt_token_ids))
        targets = placements(session.region, session.layout)
        num_rows = ticket.rows.end
        cuts = sorted({0, num_rows // 2, num_rows})
        for (layer, component), target in sorted(targets.items()):
            rows = generator.standard_normal((num_rows, target.row_bytes // 4), dtype=np.float32)
            num_bytes = num_rows * target.row_bytes
            source = Placement(
                base=rows.ctypes.data,
                block_stride_bytes=num_bytes,
                block_size=num_rows,
                row_bytes=target.row_bytes,
            )
            for chunk, (begin, end) in enumerate(itertools.pairwise(cuts)):
                span = RowRange(begin, end)
                copies = copy_spans(source, (0,), target, ticket.block_ids, span)
                receipt = Receipt(
                    ticket_id=ticket.id,
                    ticket_mac=ticket.mac,
                    layer=layer,
                    component=component,
                    rank=0,
                    chunk=chunk,
                    rows=span,
                    size_bytes=len(span) * target.row_bytes,
                    digest=session.link.write(copies, lambda: False),
                )
                yield wire.receipt_to_proto(receipt)


async def send_receipts(context: Any, receipts: Sequence[handoff_pb2.Receipt]) -> None:
    """One Progress message."""
    await context.write(pb.PrefillResponse(progress=pb.Progress(receipts=receipts)))


async def fail(context: Any, reason: errors_pb2.FailureReason) -> None:
    """The Failed message."""
    failure = errors_pb2.Failure(reason=reason, message="planned", layer=1, rank=0)
    await context.write(pb.PrefillResponse(failed=pb.Failed(failure=failure)))


async def refuse(context: Any, error: TandemError) -> None:
    """End the call with the error's status."""
    await context.abort_with_status(to_rpc_status(error))
