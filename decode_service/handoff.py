"""One attempt to have a prompt computed by one prefill service and its KV pushed to us.

    Start -> Admitted -> StartingSoon -> (blocks) Grant -> Progress*, First -> commit

Until the grant nothing can write to us, so any fault just closes the stream. From the grant on
every fault, a cancel included, goes through the revoker, which owns the blocks then.
Event loop thread only; digests are computed on an executor.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from decode_service.block_queue import BlockQueue
from decode_service.handoff_stream import DEFAULT_SILENCE_S, HandoffStream
from decode_service.landing import Revocation
from decode_service.prefill_errors import PrefillTimeoutError
from decode_service.prefill_pool import ChosenPeer
from decode_service.ticket_revoker import TicketRevoker
from kv_transfer.errors import KvTransferError, QuarantineFullError
from kv_transfer.landing import ReceiptCheck
from kv_transfer.layout import KvLayout
from kv_transfer.receiver import ReservationTable
from kv_transfer.reservation import Reservation
from kv_transfer.spans import RowRange
from kv_transfer.ticket import TicketIssuer
from serving_core.errors import (
    ComputeError,
    InvalidRequestError,
    KvCorruptError,
    OverloadedError,
    PrefillUnavailableError,
    TandemError,
)
from serving_core.request import SamplingParams
from serving_core.rpc import wire
from serving_core.telemetry import DecodeMetrics, RequestLog
from tandem.v1 import handoff_pb2
from tandem.v1 import prefill_service_pb2 as pb

# Prefill's own deadline comes a little later than ours, so that ours decides.
_DEADLINE_SLACK_S = 1.0
_MAX_UNVERIFIED_RECEIPTS = 4096

_Memory = tuple[tuple[int, ...], tuple[int, ...]]  # blocks, slots


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRequest:
    """What prefill is to compute, and what it may write.

    Attributes:
        prompt_token_ids: All tokens of the prompt.
        num_blocks: Blocks for prompt and output; all of them are reserved at once.
        sampling: How the first token is chosen.
        seed: Of the counter-based generator.
        banned_token_ids: Ids that the first token must not be.
        deadline_s: When the request's time is up, on the monotonic clock.
        log: Names the request on every line.
    """

    prompt_token_ids: tuple[int, ...]
    num_blocks: int
    sampling: SamplingParams
    seed: int
    banned_token_ids: tuple[int, ...]
    deadline_s: float
    log: RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedKv:
    """Verified KV of a prompt and the first token after it.

    Attributes:
        ticket_id: Under which it came; given back by `KvReceiver.release`.
        block_ids: Blocks of prompt and output.
        first_token_id: Sampled by prefill.
        num_cached_tokens: Prompt tokens that prefill did not have to compute.
        pushed_bytes: Verified bytes.
        queue_time_s: From Start to the first computed chunk, measured by prefill.
        compute_time_s: From the first chunk to the first token, measured by prefill.
        exposed_transfer_s: From the arrival of the first token to the commit.
    """

    ticket_id: bytes
    block_ids: tuple[int, ...]
    first_token_id: int
    num_cached_tokens: int
    pushed_bytes: int
    queue_time_s: float
    compute_time_s: float
    exposed_transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTools:
    """Collaborators that every attempt uses.

    Attributes:
        table: All reservations.
        issuer: Makes the tickets.
        blocks: The pool.
        revoker: Takes over after a fault.
        executor: Where digests are computed.
        metrics: Counts.
        layout: Of our KV.
        vocab_size: Token ids lie below it.
        lease_s: How long a ticket lives without a Renew.
        renew_interval_s: Time between two Renews.
        write_timeout_s: Longest time until prefill takes one message.
        silence_timeout_s: Longest time without any message of prefill.
        clock: Monotonic seconds.
    """

    table: ReservationTable
    issuer: TicketIssuer
    blocks: BlockQueue
    revoker: TicketRevoker
    executor: Executor
    metrics: DecodeMetrics
    layout: KvLayout
    vocab_size: int
    lease_s: float
    renew_interval_s: float
    write_timeout_s: float
    silence_timeout_s: float = DEFAULT_SILENCE_S
    clock: Callable[[], float] = time.monotonic


class Handoff:
    """One attempt; `run` is called once."""

    def __init__(
        self, request: HandoffRequest, chosen: ChosenPeer, tools: HandoffTools, *, handoff_id: str
    ) -> None:
        """Prepare an attempt at the chosen peer under an id that no other attempt has."""
        self._request = request
        self._chosen = chosen
        self._tools = tools
        self._landing = chosen.session.landing
        self._handoff_id = handoff_id
        self._was_admitted = False
        self._first: pb.First | None = None
        self._first_s = 0.0
        self._pushed_bytes = 0

    @property
    def was_admitted(self) -> bool:
        """Whether prefill has taken the request."""
        return self._was_admitted

    async def run(self) -> LandedKv:
        """Return the KV, or leave nothing behind but what the revoker ends.

        Raises:
            KvCorruptError: What landed is not what was sent.
            SessionUnknownError: The handshake is not valid any more.
            TandemError: What prefill said, or that it is gone.
        """
        time_left_s = self._request.deadline_s - self._tools.clock() + _DEADLINE_SLACK_S
        call = self._chosen.peer.stub.Prefill(timeout=time_left_s + _DEADLINE_SLACK_S)
        stream = HandoffStream(
            call,
            write_timeout_s=self._tools.write_timeout_s,
            silence_timeout_s=self._tools.silence_timeout_s,
        )
        try:
            await self._start(stream, time_left_s)
            block_ids, slots = await self._take_memory(stream)
        except BaseException:
            stream.close()
            raise
        return await self._run_granted(stream, self._reserve(block_ids, slots, stream))

    async def _start(self, stream: HandoffStream, time_left_s: float) -> None:
        request = self._request
        start = pb.Start(
            session_id=self._chosen.session.session_id,
            handoff_id=self._handoff_id,
            prompt_token_ids=request.prompt_token_ids,
            push_from_token=0,
            num_output_tokens=0,
            sampling=wire.sampling_to_proto(
                request.sampling, seed=request.seed, banned_token_ids=request.banned_token_ids
            ),
            timeout=wire.duration(time_left_s),
        )
        await stream.send(pb.PrefillRequest(start=start))
        await self._expect(stream, "admitted")
        self._was_admitted = True
        await self._expect(stream, "starting_soon")

    async def _expect(self, stream: HandoffStream, kind: str) -> None:
        message = await stream.next_message()
        found = "the end" if message is None else message.WhichOneof("message")
        if found != kind:
            raise PrefillUnavailableError(f"prefill sent {found} instead of {kind}")

    async def _take_memory(self, stream: HandoffStream) -> _Memory:
        """Wait in line for blocks and slots, unless prefill gives up meanwhile."""
        taking = asyncio.create_task(self._take_blocks_and_slots())
        reading = asyncio.create_task(stream.next_message())
        try:
            await asyncio.wait((taking, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                message = reading.result()
                found = "the end" if message is None else message.WhichOneof("message")
                raise PrefillUnavailableError(f"prefill sent {found} before the grant")
            return taking.result()
        except PrefillTimeoutError as error:
            self._leave_line(taking)
            raise OverloadedError(
                f"{self._request.num_blocks} blocks did not become free in time: {error}",
                retry_after_s=error.retry_after_s,
            ) from error
        except BaseException:
            self._leave_line(taking)
            raise
        finally:
            # The stream keeps the message for the next reader.
            reading.cancel()

    async def _take_blocks_and_slots(self) -> _Memory:
        """Blocks first, always: two that wait for each other's would wait for ever."""
        block_ids = await self._tools.blocks.take(self._request.num_blocks)
        try:
            return block_ids, await self._landing.take_slots()
        except BaseException:
            self._tools.blocks.give_back(block_ids)
            raise

    def _leave_line(self, taking: "asyncio.Task[_Memory]") -> None:
        if not taking.cancel() and not taking.cancelled() and taking.exception() is None:
            self._give_back(*taking.result())

    def _give_back(self, block_ids: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Return what nothing was granted of."""
        self._landing.give_back_slots(slots)
        self._tools.blocks.give_back(block_ids)

    def _reserve(
        self, block_ids: tuple[int, ...], slots: tuple[int, ...], stream: HandoffStream
    ) -> Reservation:
        """Issue the ticket. On a refusal nothing was granted, so the memory goes straight back."""
        tools = self._tools
        ticket = tools.issuer.issue(
            prefill_incarnation=self._chosen.session.prefill_incarnation,
            block_ids=block_ids,
            rows=RowRange(0, len(self._request.prompt_token_ids)),
            lease_s=tools.lease_s,
            slots=slots,
        )
        try:
            return self._landing.reserve(ticket, peer=self._chosen.peer.address)
        except KvTransferError as error:
            tools.issuer.retire(ticket.id)
            self._give_back(block_ids, slots)
            stream.close()
            if isinstance(error, QuarantineFullError):
                raise PrefillUnavailableError(str(error)) from error
            raise

    async def _run_granted(self, stream: HandoffStream, reservation: Reservation) -> LandedKv:
        ticket = reservation.ticket
        try:
            await self._receive(stream, reservation)
            landed = self._commit(reservation)
        except BaseException as error:
            revocation = Revocation(
                ticket=ticket,
                peer=self._chosen.peer,
                session=self._chosen.session,
                stream=stream,
                cause=type(error).__name__,
            )
            self._tools.revoker.revoke(revocation, self._landing)
            raise
        self._landing.committed(ticket)
        self._tools.revoker.finish(stream)
        return landed

    async def _receive(self, stream: HandoffStream, reservation: Reservation) -> None:
        """Grant, then take messages until everything has arrived and is verified."""
        ticket = wire.ticket_to_proto(reservation.ticket)
        await stream.send(pb.PrefillRequest(grant=pb.Grant(ticket=ticket)))
        self._request.log.info(
            "granted num_blocks=%d handoff_id=%s ticket=%s",
            len(reservation.ticket.block_ids),
            self._handoff_id,
            reservation.ticket.id.hex(),
        )
        receipts: asyncio.Queue[handoff_pb2.Receipt | None] = asyncio.Queue(
            _MAX_UNVERIFIED_RECEIPTS
        )
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(stream, reservation))
                verifying = group.create_task(self._verify(stream, receipts, reservation))
                await self._read(stream, receipts)
                await receipts.put(None)
                await verifying
                renewing.cancel()
        except BaseExceptionGroup as group_error:
            raise _first_cause(group_error) from group_error

    async def _read(
        self, stream: HandoffStream, receipts: "asyncio.Queue[handoff_pb2.Receipt | None]"
    ) -> None:
        """Read until First and receipts for every row have come."""
        layout = self._tools.layout
        num_missing_rows = len(self._request.prompt_token_ids) * layout.num_components
        while num_missing_rows > 0 or self._first is None:
            message = await stream.next_message()
            kind = "the end" if message is None else message.WhichOneof("message")
            if message is not None and kind == "progress":
                for receipt in message.progress.receipts:
                    if receipt.layer < len(layout.layers):  # else the verifier refuses it
                        num_covered = layout.num_covered(receipt.layer, receipt.component)
                        num_missing_rows -= (receipt.row_end - receipt.row_start) * num_covered
                    await receipts.put(receipt)
            elif message is not None and kind == "first" and self._first is None:
                self._take_first(message.first)
            else:
                raise PrefillUnavailableError(f"prefill sent {kind} before all rows had come")

    def _take_first(self, first: pb.First) -> None:
        token_ids = list(first.token_ids)
        if len(token_ids) != 1 or token_ids[0] >= self._tools.vocab_size:
            raise ComputeError(
                f"prefill sent {len(token_ids)} first tokens, or one outside the vocabulary"
            )
        self._first = first
        self._first_s = self._tools.clock()

    async def _verify(
        self,
        stream: HandoffStream,
        receipts: "asyncio.Queue[handoff_pb2.Receipt | None]",
        reservation: Reservation,
    ) -> None:
        """Check receipts in the order of their arrival, while later layers still compute."""
        metrics = self._tools.metrics
        ticket_id = reservation.ticket.id
        while (message := await receipts.get()) is not None:
            try:
                check = reservation.begin(wire.receipt_from_proto(message))
                started_s = self._tools.clock()
                digest = await self._land(check)
                metrics.verify_seconds.observe(self._tools.clock() - started_s)
                reservation.confirm(check, digest)
            except (KvTransferError, InvalidRequestError) as error:
                metrics.receipt_rejected(type(error).__name__)
                raise KvCorruptError(f"a receipt was refused: {error}") from error
            metrics.received_bytes.inc(check.receipt.size_bytes)
            self._pushed_bytes += check.receipt.size_bytes
            if check.receipt.slot is not None:
                freed = pb.SlotsFreed(ticket_id=ticket_id, slots=[check.receipt.slot])
                await stream.send(pb.PrefillRequest(slots_freed=freed))

    async def _land(self, check: ReceiptCheck) -> int:
        """Look at the bytes of a receipt, and move them where they are staged.

        A wait that is cancelled ends only when the executor has: until then blocks are written.
        """
        loop = asyncio.get_running_loop()
        landing = loop.run_in_executor(self._tools.executor, check.land)
        try:
            return await asyncio.shield(landing)
        except asyncio.CancelledError:
            while not landing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((landing,))
            raise

    async def _renew(self, stream: HandoffStream, reservation: Reservation) -> None:
        ticket_id = reservation.ticket.id
        while True:
            await asyncio.sleep(self._tools.renew_interval_s)
            if not await stream.send(pb.PrefillRequest(renew=pb.Renew(ticket_id=ticket_id))):
                return

    def _commit(self, reservation: Reservation) -> LandedKv:
        """Accept the KV; the table refuses when verified receipts do not tile the grant."""
        ticket = reservation.ticket
        try:
            self._tools.table.commit(ticket.id)
        except KvTransferError as error:
            raise KvCorruptError(str(error)) from error
        first = self._first
        assert first is not None  # _read returns with it only
        return LandedKv(
            ticket_id=ticket.id,
            block_ids=ticket.block_ids,
            first_token_id=first.token_ids[0],
            num_cached_tokens=first.num_cached_tokens,
            pushed_bytes=self._pushed_bytes,
            queue_time_s=first.queue_time.ToNanoseconds() / 1e9,
            compute_time_s=first.compute_time.ToNanoseconds() / 1e9,
            exposed_transfer_s=self._tools.clock() - self._first_s,
        )


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that says most: corruption before whatever it brought about."""
    errors = group.exceptions
    for kind in (KvCorruptError, TandemError):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]
