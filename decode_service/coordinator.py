"""Drives every request from admission to its one terminal state. Event loop thread only.

Each request has a task that gets its KV, hands the sequence to the compute thread and waits until
it has left; whatever ends the request early cancels that task. Blocks go back when the compute
thread has let go of them, never before.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_service.handoff import HandoffRequest, LandedKv
from decode_service.open_request import OpenRequest, RequestNumber, RequestPhase, ValidRequest
from decode_service.request_output import RequestOutput, TextStops
from decode_service.runner import Sampled, StepFailed, StepResult
from decode_service.scheduler import DecodeSequence, SequenceId
from decode_service.stop_rule import FinishReason
from decode_service.throughput import ThroughputMeter
from decode_service.timings import RequestTimings
from decode_service.token_stream import Finish, TokenStream
from serving_core.errors import (
    ComputeError,
    DeadlineError,
    DrainingError,
    OverloadedError,
    RequestCancelledError,
    TandemError,
)
from serving_core.telemetry import DecodeMetrics, RequestLog

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class Compute(Protocol):
    """What the coordinator asks of the compute thread; both return at once."""

    def join(self, sequence: DecodeSequence) -> None:
        """Let a sequence join; it leaves with exactly one last result."""

    def leave(self, sequence_id: SequenceId) -> None:
        """Let a sequence leave before the next step."""


class KvSource(Protocol):
    """Where the KV of a prompt comes from."""

    async def receive(self, request: HandoffRequest) -> LandedKv:
        """Return verified KV, or raise and hold nothing."""

    def release(self, landed: LandedKv) -> None:
        """Give the blocks back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Bounds.

    Attributes:
        max_open: Most requests that are served or wait.
        max_num_seqs: Most sequences of one step.
        block_size: Token rows of a block.
        max_unread_tokens: Most tokens that wait for a streaming client.
    """

    max_open: int
    max_num_seqs: int
    block_size: int
    max_unread_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Decoding:
    """A sequence on the compute thread; `left` is set when it touches the blocks no more."""

    one: OpenRequest
    landed: LandedKv
    left: "asyncio.Future[None]"
    is_leaving: bool = False


class RequestCoordinator:
    """All open requests."""

    def __init__(
        self,
        *,
        kv_source: KvSource,
        compute: Compute,
        limits: CoordinatorLimits,
        metrics: DecodeMetrics,
        on_idle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Take the collaborators.

        Args:
            kv_source: Gets the KV of prompts.
            compute: The compute thread.
            limits: Bounds.
            metrics: Counts.
            on_idle: Called when the last open request has ended.
            clock: Monotonic seconds.
        """
        self._kv_source = kv_source
        self._compute = compute
        self._limits = limits
        self._metrics = metrics
        self._on_idle = on_idle
        self._clock = clock
        self._open: dict[RequestNumber, OpenRequest] = {}
        self._decoding: dict[SequenceId, _Decoding] = {}
        self._next_number = itertools.count(1)
        self._throughput = ThroughputMeter(clock)
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Sequences in the next step."""
        return min(len(self._decoding), self._limits.max_num_seqs)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests whose KV has not landed."""
        return sum(
            one.request.num_prompt_tokens
            for one in self._open.values()
            if one.phase is RequestPhase.WAITING
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, lately."""
        return self._throughput.tokens_per_s()

    def submit(
        self, request: ValidRequest, *, is_streaming: bool, text_stops: TextStops | None
    ) -> OpenRequest:
        """Begin to serve a request.

        Args:
            request: What is asked.
            is_streaming: Whether the client reads while tokens come; the bound on unread tokens
                is for such clients only, the others' is max_tokens.
            text_stops: Stop strings, if it has any.

        Raises:
            DrainingError: The service shuts down.
            OverloadedError: Too many requests are open.
        """
        if self._is_draining:
            raise DrainingError("this decode service is shutting down")
        if len(self._open) >= self._limits.max_open:
            raise OverloadedError(
                f"{len(self._open)} requests are open, the limit is {self._limits.max_open}",
                retry_after_s=_RETRY_AFTER_S,
            )
        stream = TokenStream(
            max_unread_tokens=(
                self._limits.max_unread_tokens if is_streaming else request.stop_rule.max_tokens
            ),
            retry_after_s=_RETRY_AFTER_S,
        )
        number = RequestNumber(next(self._next_number))
        one = OpenRequest(
            number=number,
            request=request,
            stream=stream,
            output=RequestOutput(stream=stream, text_stops=text_stops),
            timings=RequestTimings(arrived_s=self._clock()),
            log=RequestLog(logger, request_id=f"{number}:{request.client_request_id}"),
        )
        self._open[number] = one
        self._is_idle.clear()
        one.task = asyncio.create_task(self._drive(one))
        # A task that is cancelled before its first step never runs: the end must not depend on it.
        one.task.add_done_callback(lambda _: self._ended(one))
        self._count()
        one.log.info(
            "admitted num_prompt_tokens=%d max_tokens=%d",
            request.num_prompt_tokens,
            request.stop_rule.max_tokens,
        )
        return one

    def cancel(self, one: OpenRequest) -> None:
        """End a request whose client is gone. Harmless when it has ended."""
        one.stream.fail(RequestCancelledError("the client is gone"))
        self._stop(one)

    def abort(self, client_request_id: str) -> int:
        """End every open request of that name; returns how many there were."""
        named = [
            one for one in self._open.values() if one.request.client_request_id == client_request_id
        ]
        for one in named:
            one.stream.finish(Finish(reason=FinishReason.ABORT))
            self._stop(one)
        return len(named)

    def on_results(self, results: Sequence[StepResult]) -> None:
        """Take what the compute thread reports."""
        num_tokens = 0
        for result in results:
            decoding = self._decoding[result.sequence_id]
            if isinstance(result, Sampled):
                num_tokens += 1
                self._on_sampled(decoding, result)
            elif isinstance(result, StepFailed):
                decoding.one.stream.fail(ComputeError(f"a decode step failed: {result.message}"))
            if not isinstance(result, Sampled) or result.finish is not None:
                self._on_left(result.sequence_id)
        self._throughput.add(num_tokens)
        self._metrics.generation_tokens.inc(num_tokens)

    def fail_all(self, cause: str) -> None:
        """End every request, because the service cannot go on."""
        self._is_draining = True
        for one in list(self._open.values()):
            one.stream.fail(DrainingError(cause))
            self._stop(one)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests, let the open ones finish, cancel the rest after `grace_s`.

        Returns:
            Whether every request ended by itself.
        """
        self._is_draining = True
        if await self._wait_idle(grace_s):
            return True
        self.fail_all("this decode service is shutting down")
        await self._wait_idle(grace_s)
        return False

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _drive(self, one: OpenRequest) -> None:
        """Serve a request; its stream gets exactly one end, the first that is told."""
        time_left_s = one.request.deadline_s - self._clock()
        try:
            async with asyncio.timeout(time_left_s):
                await self._serve(one)
        except TimeoutError:
            one.stream.fail(DeadlineError("the request's time ran out"))
        except TandemError as error:
            one.stream.fail(error)
        except Exception as error:  # the handler turns it into INTERNAL and logs it
            one.stream.fail(error)

    async def _serve(self, one: OpenRequest) -> None:
        request = one.request
        landed = await self._kv_source.receive(self._handoff_request(one))
        self._on_landed(one, landed)
        finish = request.stop_rule.check(landed.first_token_id, 1)
        if not one.output.take(landed.first_token_id, finish):
            self._kv_source.release(landed)
            return
        sequence_id = SequenceId(one.number)
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        decoding = _Decoding(one=one, landed=landed, left=left)
        self._decoding[sequence_id] = decoding
        self._compute.join(
            DecodeSequence(
                sequence_id=sequence_id,
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=landed.block_ids,
                sampling=request.sampling,
                seed=request.seed,
                stop_rule=request.stop_rule,
                last_token_id=landed.first_token_id,
            )
        )
        self._count()
        try:
            await asyncio.shield(left)
        except asyncio.CancelledError:
            # The request stays open until no step writes its blocks: a step or two.
            self._leave(sequence_id, decoding)
            await left
            raise

    def _handoff_request(self, one: OpenRequest) -> HandoffRequest:
        request = one.request
        max_rows = request.num_prompt_tokens + request.stop_rule.max_tokens
        return HandoffRequest(
            prompt_token_ids=request.prompt_token_ids,
            num_blocks=-(-max_rows // self._limits.block_size),
            sampling=request.sampling,
            seed=request.seed,
            banned_token_ids=request.stop_rule.banned_token_ids(0),
            deadline_s=request.deadline_s,
            log=one.log,
        )

    def _on_landed(self, one: OpenRequest, landed: LandedKv) -> None:
        now_s = self._clock()
        one.phase = RequestPhase.DECODING
        one.timings.landed = landed
        one.timings.first_token_s = one.timings.last_token_s = now_s
        self._metrics.prompt_tokens.inc(one.request.num_prompt_tokens)
        self._metrics.generation_tokens.inc()
        self._metrics.ttft_seconds.observe(now_s - one.timings.arrived_s)
        self._metrics.exposed_transfer_seconds.observe(landed.exposed_transfer_s)
        one.log.info(
            "landed pushed_bytes=%d exposed_transfer_s=%.6f ticket=%s",
            landed.pushed_bytes,
            landed.exposed_transfer_s,
            landed.ticket_id.hex(),
        )

    def _on_sampled(self, decoding: _Decoding, result: Sampled) -> None:
        one = decoding.one
        if not one.stream.is_open:
            return
        now_s = self._clock()
        assert one.timings.last_token_s is not None  # the KV landed with a first token
        self._metrics.tpot_seconds.observe(now_s - one.timings.last_token_s)
        one.timings.last_token_s = now_s
        if not one.output.take(result.token_id, result.finish) and result.finish is None:
            self._leave(result.sequence_id, decoding)

    def _leave(self, sequence_id: SequenceId, decoding: _Decoding) -> None:
        if not decoding.is_leaving and not decoding.left.done():
            decoding.is_leaving = True
            self._compute.leave(sequence_id)

    def _on_left(self, sequence_id: SequenceId) -> None:
        decoding = self._decoding.pop(sequence_id)
        self._kv_source.release(decoding.landed)
        if not decoding.left.done():
            decoding.left.set_result(None)
        self._count()

    def _stop(self, one: OpenRequest) -> None:
        if one.task is not None and one.phase is not RequestPhase.ENDED:
            one.task.cancel()

    def _ended(self, one: OpenRequest) -> None:
        one.phase = RequestPhase.ENDED
        one.stream.fail(RequestCancelledError("the request was cancelled"))
        del self._open[one.number]
        reason = one.stream.end_reason
        self._metrics.request_ended(reason)
        self._metrics.e2e_seconds.observe(self._clock() - one.timings.arrived_s)
        self._count()
        one.log.info("ended reason=%s num_output_tokens=%d", reason, one.output.num_tokens)
        if not self._open:
            self._is_idle.set()
            self._on_idle()

    def _count(self) -> None:
        self._metrics.num_requests_running.set(self.num_running)
        self._metrics.num_requests_waiting.set(len(self._open) - self.num_running)
