"""Drives every job from Start to its one terminal state. Event loop thread only; never blocks.

The coordinator reacts to events: messages of the stream, alarms, results of the compute thread
and reports of the push pipeline. Whatever ends a job early goes through `_end`: the first cause
counts, the job leaves the compute thread and the push pipeline, decode is told when no write can
happen any more, and the own blocks return when the compute thread has let go of them as well.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kv_transfer.errors import KvTransferError, PushQueueFullError, PushRefusedError
from kv_transfer.layout import KvLayout
from kv_transfer.session import JobState
from kv_transfer.ticket import Receipt, Ticket
from prefill_service import last_message
from prefill_service.admission import Admission, Waiting
from prefill_service.job import JobRequest, PrefillJob
from prefill_service.kv_push import PushFailed
from prefill_service.outbox import Outbox
from prefill_service.runner import ComputeJob, ComputeResult, Removed, Sampled
from prefill_service.scheduler import JobId
from prefill_service.sessions import DecodeSession
from prefill_service.ticket_book import TicketBook
from prefill_service.validation import check_ticket
from serving_core.errors import DrainingError, InvalidRequestError, PrefillUnavailableError
from serving_core.rpc import wire
from tandem.v1 import errors_pb2
from tandem.v1 import prefill_service_pb2 as pb

logger = logging.getLogger(__name__)

# This service runs on one rank until the ranks of a later version exist.
RANK = 0


class Compute(Protocol):
    """What the coordinator asks of the compute thread; both return at once."""

    def add(self, job: ComputeJob) -> None:
        """Queue a job; it is answered by exactly one result."""

    def remove(self, job_id: JobId) -> None:
        """Let a job leave before the next step."""


class JobObserver(Protocol):
    """Is told how jobs fare, for metrics."""

    def bytes_pushed(self, num_bytes: int) -> None:
        """Rows were written completely."""

    def job_sampled(self, job: PrefillJob, *, queue_time_s: float, compute_time_s: float) -> None:
        """The first token of the job was sampled."""

    def job_ended(self, job: PrefillJob, state: JobState) -> None:
        """The job reached its terminal state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Bounds of the waits and queues of a job.

    Attributes:
        grant_timeout_s: Longest wait for the grant.
        drain_timeout_s: Longest wait for the push pipeline to be quiet.
        outbox_capacity: Most messages that wait for a stream.
    """

    grant_timeout_s: float
    drain_timeout_s: float
    outbox_capacity: int


class JobCoordinator:
    """All jobs of the service."""

    def __init__(
        self,
        *,
        prefill_incarnation: str,
        layout: KvLayout,
        admission: Admission,
        compute: Compute,
        tickets: TicketBook,
        limits: JobLimits,
        observer: JobObserver,
        clock: Callable[[], float],
    ) -> None:
        """Take the collaborators.

        Args:
            prefill_incarnation: Of this process; tickets must name it.
            layout: Of the KV on this side.
            admission: Queue and blocks.
            compute: The compute thread.
            tickets: Used ticket ids.
            limits: Bounds of a job.
            observer: Gets the outcome of each job.
            clock: Monotonic seconds, the same clock as the compute thread's.
        """
        self._prefill_incarnation = prefill_incarnation
        self._layout = layout
        self._admission = admission
        self._compute = compute
        self._tickets = tickets
        self._limits = limits
        self._observer = observer
        self._clock = clock
        self._jobs: dict[JobId, PrefillJob] = {}
        self._next_job_id = itertools.count(1)
        self._num_pushed_bytes = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_queued(self) -> int:
        """Number of jobs that hold no blocks yet."""
        return self._admission.num_queued

    @property
    def num_active(self) -> int:
        """Number of jobs that hold blocks or are not quiet yet."""
        return len(self._jobs) - self._admission.num_queued

    @property
    def num_pushed_bytes(self) -> int:
        """Bytes written to decode services since start."""
        return self._num_pushed_bytes

    def check_accepting(self) -> None:
        """Refuse what would begin something new while the service shuts down.

        Raises:
            DrainingError: As said.
        """
        if self._is_draining:
            raise DrainingError("this prefill service is shutting down")

    # Messages of the stream.

    def admit(self, request: JobRequest, session: DecodeSession) -> PrefillJob:
        """Queue a validated request.

        Raises:
            DrainingError: The service shuts down.
            OverloadedError: The queue is full.
        """
        self.check_accepting()
        job = PrefillJob(
            job_id=JobId(next(self._next_job_id)),
            request=request,
            session=session,
            outbox=Outbox(capacity=self._limits.outbox_capacity),
            arrived_s=self._clock(),
            num_rows_to_push=(request.num_tokens - request.push_from) * self._layout.num_components,
        )
        num_pending_tokens = self._admission.num_pending_tokens
        self._admission.enqueue(
            Waiting(
                job_id=job.job_id,
                num_tokens=request.num_tokens,
                on_reserved=partial(self._on_reserved, job),
            )
        )
        self._jobs[job.job_id] = job
        self._is_idle.clear()
        session.enter()
        self._set_alarm(job, "deadline", request.timeout_s, self._on_deadline)
        job.outbox.put(
            pb.PrefillResponse(admitted=pb.Admitted(num_pending_tokens=num_pending_tokens))
        )
        self._log(job, "admitted num_tokens=%d", request.num_tokens)
        self._admission.start_ready()
        return job

    def grant(self, job: PrefillJob, ticket: Ticket) -> None:
        """Start the job under the ticket, or fail it when the ticket does not fit."""
        if job.is_ending:
            return
        try:
            if job.ticket is not None or not job.block_ids:
                raise InvalidRequestError("grant", "out of turn", "once, after StartingSoon")
            check_ticket(
                ticket,
                session=job.session,
                prefill_incarnation=self._prefill_incarnation,
                request=job.request,
            )
            if self._tickets.is_used(ticket.id):
                raise InvalidRequestError("ticket.id", "used or revoked before", "a new id")
        except InvalidRequestError as error:
            self.fail(job, errors_pb2.FAILURE_REASON_TICKET_REJECTED, str(error))
            return
        self._tickets.bind(ticket.id, job.job_id)
        job.ticket = ticket
        try:
            job.push = job.session.pusher.open_job(
                ticket,
                job.block_ids,
                on_receipt=partial(self._on_receipt, job),
                on_failure=partial(self._on_push_failed, job),
            )
        except KvTransferError as error:
            reason = (
                errors_pb2.FAILURE_REASON_OVERLOADED
                if isinstance(error, PushQueueFullError)
                else errors_pb2.FAILURE_REASON_TICKET_REJECTED
            )
            self.fail(job, reason, str(error), rank=RANK)
            return
        job.machine.to(JobState.COMPUTING)
        job.in_compute = True
        job.timers.cancel("grant")
        self._set_alarm(job, "lease", ticket.lease_s, self._on_lease_expired)
        self._compute.add(
            ComputeJob(
                job_id=job.job_id,
                token_ids=job.request.prompt_token_ids,
                block_ids=job.block_ids,
                push_from=job.request.push_from,
                sampling=job.request.sampling,
                pusher=job.push,
            )
        )
        self._log(job, "granted lease_s=%.3f", ticket.lease_s)

    def renew(self, job: PrefillJob, ticket_id: bytes) -> None:
        """Let the lease of the job's ticket count again from now."""
        if job.is_ending:
            return
        if job.ticket is None or job.push is None or ticket_id != job.ticket.id:
            message = "renew.ticket_id is not the granted ticket's"
            self.fail(job, errors_pb2.FAILURE_REASON_INVALID_REQUEST, message)
            return
        job.push.renew()
        self._set_alarm(job, "lease", job.ticket.lease_s, self._on_lease_expired)

    def free_slots(self, job: PrefillJob, ticket_id: bytes, slots: Sequence[int]) -> None:
        """Let slots of the job's ticket be written again."""
        if job.is_ending:
            return
        try:
            if job.ticket is None or job.push is None or ticket_id != job.ticket.id:
                raise InvalidRequestError(
                    "slots_freed.ticket_id", "another", "the granted ticket's"
                )
            job.push.free_slots(wire.slots_from_proto("slots_freed.slots", slots, low=1))
        except (InvalidRequestError, PushRefusedError) as error:
            self.fail(job, errors_pb2.FAILURE_REASON_INVALID_REQUEST, str(error))

    def revoke(self, job: PrefillJob, cause: str) -> None:
        """End the job on decode's wish; answered by Drained. Idempotent."""
        self._end(
            job,
            JobState.CANCELLED,
            last_message.drained(job.ticket_id),
            cause=cause,
        )

    def fail(
        self,
        job: PrefillJob,
        reason: errors_pb2.FailureReason,
        message: str,
        *,
        layer: int | None = None,
        rank: int | None = None,
    ) -> None:
        """End the job for a reason that decode is told once the push is quiet. Idempotent."""
        failure = errors_pb2.Failure(reason=reason, message=message, layer=layer, rank=rank)
        self._end(
            job,
            JobState.FAILED,
            last_message.failed(failure),
            cause=f"{errors_pb2.FailureReason.Name(reason)}: {message}",
        )

    async def revoke_ticket(self, ticket_id: bytes, cause: str) -> None:
        """Return when no write under the ticket can happen any more, now or ever.

        Raises:
            OverloadedError: The id is unknown and cannot be remembered.
            PrefillUnavailableError: The push pipeline is not quiet in time; ask again.
        """
        job_id = self._tickets.live_job(ticket_id)
        if job_id is None:
            self._tickets.bury_unknown(ticket_id)
            return
        job = self._jobs[job_id]
        self.revoke(job, cause)
        try:
            await asyncio.wait_for(job.drained.wait(), self._limits.drain_timeout_s)
        except TimeoutError as error:
            raise self._not_quiet(job) from error

    # Results of the compute thread and reports of the push pipeline.

    def on_compute_result(self, result: ComputeResult) -> None:
        """Take the one result of a job; from now on the compute thread leaves its blocks alone."""
        job = self._jobs[result.job_id]
        job.in_compute = False
        if job.is_ending:
            self._settle(job)
        elif isinstance(result, Sampled):
            self._on_sampled(job, result)
        else:
            assert not isinstance(result, Removed)  # only ending jobs are removed
            where = "outside the layers" if result.layer is None else f"at layer {result.layer}"
            message = f"model step failed {where} on rank {RANK}: {result.message}"
            self.fail(
                job,
                errors_pb2.FAILURE_REASON_COMPUTE_FAILED,
                message,
                layer=result.layer,
                rank=RANK,
            )

    def _on_sampled(self, job: PrefillJob, result: Sampled) -> None:
        queue_time_s = max(0.0, result.started_s - job.arrived_s)
        compute_time_s = result.sampled_s - result.started_s
        first = pb.First(token_ids=[result.token_id])
        first.queue_time.FromNanoseconds(round(queue_time_s * 1e9))
        first.compute_time.FromNanoseconds(round(compute_time_s * 1e9))
        job.machine.to(JobState.PUSHING)
        job.is_sampled = True
        job.outbox.put(pb.PrefillResponse(first=first))
        self._observer.job_sampled(job, queue_time_s=queue_time_s, compute_time_s=compute_time_s)
        self._finish_if_complete(job)

    def _on_receipt(self, job: PrefillJob, receipt: Receipt) -> None:
        self._num_pushed_bytes += receipt.size_bytes
        self._observer.bytes_pushed(receipt.size_bytes)
        if job.is_ending:
            return
        num_covered = self._layout.num_covered(receipt.layer, receipt.component)
        job.num_rows_reported += len(receipt.rows) * num_covered
        if not job.outbox.put_receipt(wire.receipt_to_proto(receipt)):
            message = f"{len(job.outbox)} messages wait for decode to read them"
            self.fail(job, errors_pb2.FAILURE_REASON_OVERLOADED, message)
            return
        self._finish_if_complete(job)

    def _on_push_failed(self, job: PrefillJob, failed: PushFailed) -> None:
        reason = (
            errors_pb2.FAILURE_REASON_LEASE_EXPIRED
            if failed.is_lease_expired
            else errors_pb2.FAILURE_REASON_WRITE_FAILED
        )
        self.fail(job, reason, failed.message, layer=failed.layer, rank=failed.rank)

    # Alarms.

    def _on_reserved(self, job: PrefillJob, block_ids: tuple[int, ...]) -> None:
        job.block_ids = block_ids
        job.outbox.put(pb.PrefillResponse(starting_soon=pb.StartingSoon()))
        self._set_alarm(job, "grant", self._limits.grant_timeout_s, self._on_no_grant)

    def _on_no_grant(self, job: PrefillJob) -> None:
        message = f"no grant within {self._limits.grant_timeout_s} s"
        self.fail(job, errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, message)

    def _on_deadline(self, job: PrefillJob) -> None:
        message = f"not done within {job.request.timeout_s} s"
        self.fail(job, errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, message)

    def _on_lease_expired(self, job: PrefillJob) -> None:
        message = "decode has not renewed the lease"
        self.fail(job, errors_pb2.FAILURE_REASON_LEASE_EXPIRED, message)

    def _on_not_quiet(self, job: PrefillJob) -> None:
        job.outbox.fail(self._not_quiet(job))

    def _not_quiet(self, job: PrefillJob) -> PrefillUnavailableError:
        return PrefillUnavailableError(
            f"a write of handoff {job.request.handoff_id} has not ended within "
            f"{self._limits.drain_timeout_s} s"
        )

    def _set_alarm(
        self, job: PrefillJob, purpose: str, delay_s: float, action: Callable[[PrefillJob], None]
    ) -> None:
        job.timers.set(purpose, asyncio.get_running_loop().call_later(delay_s, action, job))

    # The end of a job.

    def _finish_if_complete(self, job: PrefillJob) -> None:
        if job.is_sampled and job.num_rows_reported == job.num_rows_to_push:
            job.timers.cancel_all()
            job.machine.to(JobState.DONE)
            assert job.push is not None  # rows were pushed
            job.push.close()
            self._become_quiet(job)
            self._release(job)

    def _end(
        self, job: PrefillJob, end_state: JobState, last_words: pb.PrefillResponse, *, cause: str
    ) -> None:
        """Begin to drain, unless the outcome is decided already."""
        if job.is_ending:
            return
        self._log(job, "ends as %s: %s", end_state.name, cause)
        job.machine.to(JobState.DRAINING)
        job.end_state = end_state
        job.last_message = last_words
        job.timers.cancel_all()
        self._admission.withdraw(job.job_id)
        if job.in_compute:
            self._compute.remove(job.job_id)
        if job.push is None:
            self._on_push_quiet(job)
        else:
            self._set_alarm(job, "drain", self._limits.drain_timeout_s, self._on_not_quiet)
            job.push.revoke(on_quiet=partial(self._on_push_quiet, job))

    def _on_push_quiet(self, job: PrefillJob) -> None:
        job.timers.cancel_all()
        if job.push is not None and not job.session.pusher.proves_quiet():
            job.last_message = last_message.link_broken(job.last_message, rank=RANK)
        job.outbox.put(job.last_message)
        self._become_quiet(job)
        self._settle(job)

    def _become_quiet(self, job: PrefillJob) -> None:
        """From here on nothing is written under the job's ticket."""
        job.push_quiet = True
        job.outbox.close()
        job.drained.set()
        if job.ticket is not None:
            self._tickets.bury_live(job.ticket.id)

    def _settle(self, job: PrefillJob) -> None:
        """Leave DRAINING when neither the push nor the compute thread needs the job."""
        if job.push_quiet and not job.in_compute:
            job.machine.to(job.end_state)
            self._release(job)

    def _release(self, job: PrefillJob) -> None:
        state = job.machine.state
        del self._jobs[job.job_id]
        self._observer.job_ended(job, state)
        self._log(job, "ended state=%s", state.name)
        job.session.leave()
        if job.block_ids:
            self._admission.release(job.job_id)
        if not self._jobs:
            self._is_idle.set()

    # Many jobs at once.

    def fail_session(self, session: DecodeSession, message: str) -> None:
        """Fail all jobs of a session whose decode service is gone."""
        for job in list(self._jobs.values()):
            if job.session is session:
                self.fail(job, errors_pb2.FAILURE_REASON_WRITE_FAILED, message, rank=RANK)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new jobs, let started ones finish, fail the rest after `grace_s`.

        Returns:
            Whether every job has ended.
        """
        self._is_draining = True
        message = "this prefill service is shutting down"
        for job_id in self._admission.queued_job_ids():
            self.fail(self._jobs[job_id], errors_pb2.FAILURE_REASON_DRAINING, message)
        if await self._wait_idle(grace_s):
            return True
        for job in list(self._jobs.values()):
            self.fail(job, errors_pb2.FAILURE_REASON_DRAINING, message)
        return await self._wait_idle(self._limits.drain_timeout_s)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _log(self, job: PrefillJob, event: str, *args: object) -> None:
        logger.info(
            "handoff_id=%s ticket_id=%s " + event,
            job.request.handoff_id,
            job.ticket_id.hex(),
            *args,
        )
