"""A decode service without a model: real gRPC, real memory, real tickets, scripted behaviour.

It reserves nothing and decodes nothing; a test says which messages it sends, and every receipt is
verified by the same code as in the decode service.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from attention_core.paged_kv import PagedKvCache
from kv_transfer.engine.base import TransferEngine
from kv_transfer.receiver import ReceiverLimits, Reservation, ReservationTable
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, Ticket, TicketIssuer
from serving_core.kv_regions import (
    cache_over_target,
    kv_layout,
    target_region_map,
    target_size_bytes,
)
from serving_core.model.transformer import CausalLM
from serving_core.rpc import wire
from tandem.v1 import errors_pb2, handoff_pb2
from tandem.v1 import prefill_service_pb2 as pb
from tandem.v1 import prefill_service_pb2_grpc as pb_grpc

MESSAGE_TIMEOUT_S = 10.0
LEASE_S = 5.0
GREEDY = handoff_pb2.SamplingParams(temperature=0, top_p=1, seed=7)


@dataclass(kw_only=True)
class Result:
    """What one hand-off brought.

    Attributes:
        kinds: Kinds of all messages in order, heartbeats left out.
        receipts: All receipts in order.
        token_ids: The first token, or nothing.
        failure: Why it failed; of reason UNSPECIFIED when it did not.
        drained: Whether Drained came.
    """

    kinds: list[str] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    failure: errors_pb2.Failure = field(default_factory=errors_pb2.Failure)
    drained: bool = False


class Handoff:
    """One open Prefill stream, as decode sees it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.result = Result()

    async def send(self, **message: Any) -> None:
        """Sends one PrefillRequest, e.g. `send(start=...)`."""
        await self._call.write(pb.PrefillRequest(**message))

    async def next(self) -> pb.PrefillResponse | None:
        """The next message but heartbeats, kept in `result`; None at an OK end.

        Raises:
            grpc.aio.AioRpcError: the stream ended with another status.
        """
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            message = await self._call.read()
            while message is not grpc.aio.EOF and message.WhichOneof("message") == "heartbeat":
                message = await self._call.read()
        if message is grpc.aio.EOF:
            return None
        kind = message.WhichOneof("message")
        self.result.kinds.append(kind)
        if kind == "progress":
            self.result.receipts += map(wire.receipt_from_proto, message.progress.receipts)
        elif kind == "first":
            self.result.token_ids += message.first.token_ids
        elif kind == "failed":
            self.result.failure = message.failed.failure
        elif kind == "drained":
            self.result.drained = True
        return message

    async def until(self, kind: str) -> Any:
        """Reads up to the next message of a kind and returns its content."""
        while (message := await self.next()) is not None:
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
        raise AssertionError(f"the stream ended without {kind}: {self.result.kinds}")

    async def rest(self) -> Result:
        """Reads to the OK end of the stream."""
        while await self.next() is not None:
            pass
        return self.result

    async def grant(self, ticket: Ticket) -> None:
        """Hands over a ticket."""
        await self.send(grant=pb.Grant(ticket=wire.ticket_to_proto(ticket)))

    def cancel(self) -> None:
        """Breaks the stream."""
        self._call.cancel()

    async def done_writing(self) -> None:
        """Closes decode's direction only."""
        await self._call.done_writing()


class FakeDecode:
    """Decode's memory, tickets and connection to one prefill service."""

    def __init__(
        self,
        model: CausalLM,
        engine: TransferEngine,
        address: str,
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.incarnation = secrets.token_hex(16)
        self.layout = kv_layout(model, block_size, model.fingerprint)
        self.target = engine.create_target(
            target_size_bytes(model.kv_components, num_blocks=num_blocks, block_size=block_size)
        )
        self.cache = cache_over_target(
            self.target, model.kv_components, num_blocks=num_blocks, block_size=block_size
        )
        self.region = target_region_map(self.cache, self.target.address)
        self.issuer = TicketIssuer(self.incarnation)
        self.table = ReservationTable(
            issuer=self.issuer,
            layout=self.layout,
            region=self.region,
            memory=self.target.buffer,
            clock=time.monotonic,
            limits=ReceiverLimits(max_quarantined_blocks_per_peer=num_blocks),
        )
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]  # descending, so that no row order is by chance
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = pb_grpc.PrefillServiceStub(self._channel)
        self.session_id = ""
        self.prefill_incarnation = ""

    async def close(self) -> None:
        """Disconnects and lets go of the memory."""
        await self._channel.close()
        self.target.close()

    def handshake_request(self) -> pb.HandshakeRequest:
        """A request that prefill accepts, for tests to spoil."""
        return pb.HandshakeRequest(
            protocol_version=1,
            decode_incarnation=self.incarnation,
            layout=wire.layout_to_proto(self.layout),
            region=wire.region_to_proto(self.region, self.target.descriptor),
            max_model_len=4096,
        )

    async def handshake(self) -> pb.HandshakeResponse:
        """Shakes hands and keeps the session."""
        reply = await self.stub.Handshake(self.handshake_request(), timeout=MESSAGE_TIMEOUT_S)
        self.session_id = reply.session_id
        self.prefill_incarnation = reply.prefill_incarnation
        return reply

    def start(self, prompt: Sequence[int], **changes: Any) -> pb.Start:
        """A Start that prefill accepts; `changes` replace its fields."""
        fields: dict[str, Any] = {
            "session_id": self.session_id,
            "handoff_id": secrets.token_hex(4),
            "prompt_token_ids": prompt,
            "sampling": GREEDY,
            "timeout": wire.duration(60.0),
        }
        return pb.Start(**(fields | changes))

    def open(self) -> Handoff:
        """An open stream without any message."""
        return Handoff(self.stub.Prefill())

    async def begin(self, start: pb.Start) -> Handoff:
        """An open stream whose Start was sent."""
        handoff = self.open()
        await handoff.send(start=start)
        return handoff

    def reserve(
        self, num_tokens: int, *, push_from: int = 0, lease_s: float = LEASE_S
    ) -> Reservation:
        """Takes blocks and issues a ticket for them."""
        num_blocks = -(-num_tokens // self.block_size)
        block_ids = tuple(self._free.pop(0) for _ in range(num_blocks))
        ticket = self.issuer.issue(
            prefill_incarnation=self.prefill_incarnation,
            block_ids=block_ids,
            rows=RowRange(push_from, num_tokens),
            lease_s=lease_s,
        )
        return self.table.reserve(ticket, peer="prefill")

    async def granted(
        self, start: pb.Start, *, lease_s: float = LEASE_S
    ) -> tuple[Handoff, Reservation]:
        """A stream whose ticket was just granted."""
        handoff = await self.begin(start)
        await handoff.until("starting_soon")
        reservation = self.reserve(
            len(start.prompt_token_ids), push_from=start.push_from_token, lease_s=lease_s
        )
        await handoff.grant(reservation.ticket)
        return handoff, reservation

    async def prefill(self, start: pb.Start) -> tuple[Result, Reservation]:
        """A whole hand-off; every receipt is verified against the memory."""
        handoff, reservation = await self.granted(start)
        result = await handoff.rest()
        for receipt in result.receipts:
            reservation.accept(receipt)
        return result, reservation

    def rows(self, reservation: Reservation, layer: int, component: str) -> torch.Tensor:
        """The rows of a sequence, [len(rows), width], in logical order from its first granted."""
        tensor = self.cache.tensor(layer, component)  # [nb, bs, W]
        rows = tensor[list(reservation.ticket.block_ids)].flatten(0, 1)
        return rows[reservation.ticket.rows.start : reservation.ticket.rows.end].clone()

    async def revoke(self, ticket_id: bytes) -> pb.RevokeResponse:
        """The unary Revoke."""
        request = pb.RevokeRequest(ticket_id=ticket_id, cause="test")
        return await self.stub.Revoke(request, timeout=MESSAGE_TIMEOUT_S)

    async def pool_status(self) -> pb.GetPoolStatusResponse:
        """Prefill's counts."""
        return await self.stub.GetPoolStatus(pb.GetPoolStatusRequest(), timeout=MESSAGE_TIMEOUT_S)

    async def wait_whole(self, timeout_s: float) -> None:
        """Waits until prefill holds no block and no job.

        Raises:
            TimeoutError: it did not come to that in time.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                status = await self.pool_status()
                is_whole = status.num_free_blocks == status.num_blocks
                if is_whole and status.num_active_jobs + status.num_queued_jobs == 0:
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def fake_decode(
    model: CausalLM, engine: TransferEngine, address: str, *, num_blocks: int, block_size: int
) -> AsyncIterator[FakeDecode]:
    """A decode service that has shaken hands."""
    decode = FakeDecode(model, engine, address, num_blocks=num_blocks, block_size=block_size)
    try:
        await decode.handshake()
        yield decode
    finally:
        await decode.close()


def cache_rows(
    cache: PagedKvCache, block_ids: Sequence[int], layer: int, component: str, num_rows: int
) -> torch.Tensor:
    """The first rows of a sequence in any cache, [num_rows, width]."""
    return cache.tensor(layer, component)[list(block_ids)].flatten(0, 1)[:num_rows].clone()
