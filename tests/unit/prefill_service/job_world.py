"""A job coordinator whose compute thread and push pipeline do what the test says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kv_transfer.errors import KvTransferError, PushRefusedError
from kv_transfer.layout import ComponentLayout, KvLayout, LayerLayout
from kv_transfer.session import JobState
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, Ticket
from prefill_service.admission import Admission
from prefill_service.job import JobRequest, PrefillJob
from prefill_service.jobs import JobCoordinator, JobLimits
from prefill_service.kv_push import PushFailed
from prefill_service.runner import ComputeJob, Removed, Sampled, StepFailed
from prefill_service.scheduler import JobId
from prefill_service.sessions import DecodeSession
from prefill_service.ticket_book import TicketBook
from serving_core.block_pool import BlockPool
from serving_core.request import SamplingParams
from serving_core.sampler import SampleRequest
from tandem.v1 import prefill_service_pb2 as pb

BLOCK_SIZE = 4
NUM_BLOCKS = 8
NUM_COMPONENTS = 3
LAYOUT = KvLayout(
    model_fingerprint="model",
    block_size=BLOCK_SIZE,
    layers=(
        LayerLayout(
            components=tuple(
                ComponentLayout(name=str(index), dtype="float32", row_bytes=4)
                for index in range(NUM_COMPONENTS)
            )
        ),
    ),
)
PREFILL, DECODE = "prefill-1", "decode-1"


class FakeCompute:
    """Holds the jobs that were added until the test lets them leave."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, ComputeJob] = {}
        self.removed: list[JobId] = []

    def add(self, job: ComputeJob) -> None:
        assert job.job_id not in self.jobs
        self.jobs[job.job_id] = job

    def remove(self, job_id: JobId) -> None:
        assert job_id not in self.removed, "a job is removed at most once"
        self.removed.append(job_id)


@dataclass(kw_only=True, eq=False)
class FakePush:
    """One open ticket; quiet when the test says so."""

    ticket: Ticket
    block_ids: tuple[int, ...]
    on_receipt: Callable[[Receipt], None]
    on_failure: Callable[[PushFailed], None]
    num_renewals: int = 0
    freed_slots: list[int] = field(default_factory=list)
    refused_slots: set[int] = field(default_factory=set)
    is_closed: bool = False
    on_quiet: list[Callable[[], None]] = field(default_factory=list)

    def submit(self, **_: Any) -> None:
        raise AssertionError("only the compute thread submits")

    def renew(self) -> None:
        self.num_renewals += 1

    def free_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self.refused_slots:
                raise PushRefusedError("slot", slot, "a slot that was written")
        self.freed_slots.extend(slots)

    def close(self) -> None:
        self.is_closed = True

    def revoke(self, *, on_quiet: Callable[[], None]) -> None:
        assert not self.on_quiet, "revoked at most once"
        self.on_quiet.append(on_quiet)

    def report(self, rows: RowRange, component: int) -> None:
        """Reports a write of one of the components."""
        self.on_receipt(
            Receipt(
                ticket_id=self.ticket.id,
                ticket_mac=self.ticket.mac,
                layer=0,
                component=str(component),
                rank=0,
                chunk=0,
                rows=rows,
                size_bytes=16 * len(rows),
                digest=1,
            )
        )

    def report_all(self) -> None:
        """Reports everything that was granted."""
        for component in range(NUM_COMPONENTS):
            self.report(self.ticket.rows, component)


class FakePusher:
    """Opens tickets, or refuses with the error that the test set."""

    def __init__(self) -> None:
        self.pushes: dict[bytes, FakePush] = {}
        self.error: KvTransferError | None = None
        self.is_broken = False

    def proves_quiet(self) -> bool:
        return not self.is_broken

    def open_job(
        self,
        ticket: Ticket,
        block_ids: tuple[int, ...],
        *,
        on_receipt: Callable[[Receipt], None],
        on_failure: Callable[[PushFailed], None],
    ) -> FakePush:
        if self.error is not None:
            raise self.error
        assert ticket.id not in self.pushes, "a ticket is opened at most once"
        push = FakePush(
            ticket=ticket, block_ids=block_ids, on_receipt=on_receipt, on_failure=on_failure
        )
        self.pushes[ticket.id] = push
        return push


class FakeSession:
    """A session that counts its jobs."""

    decode_incarnation = DECODE
    num_target_blocks = 64
    target_block_size = BLOCK_SIZE

    def __init__(self) -> None:
        self.pusher = FakePusher()
        self.num_jobs = 0

    def enter(self) -> None:
        self.num_jobs += 1

    def leave(self) -> None:
        self.num_jobs -= 1


@dataclass(kw_only=True)
class Ends:
    """Terminal states in order of arrival, and the counted bytes."""

    states: dict[JobId, JobState] = field(default_factory=dict)
    num_bytes: int = 0

    def bytes_pushed(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def job_sampled(self, job: PrefillJob, *, queue_time_s: float, compute_time_s: float) -> None:
        assert queue_time_s >= 0
        assert compute_time_s >= 0

    def job_ended(self, job: PrefillJob, state: JobState) -> None:
        assert job.job_id not in self.states, "a job ends exactly once"
        assert job.machine.is_terminal
        self.states[job.job_id] = state


class World:
    """The coordinator and everything around it; make it inside a running loop."""

    def __init__(
        self,
        *,
        max_num_queued: int = 8,
        grant_timeout_s: float = 30.0,
        drain_timeout_s: float = 30.0,
        outbox_capacity: int = 1000,
    ) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.compute = FakeCompute()
        self.session = FakeSession()
        self.ends = Ends()
        self.tickets = TicketBook(keep_s=60.0, max_graves=1000, clock=lambda: 0.0)
        self.jobs = JobCoordinator(
            prefill_incarnation=PREFILL,
            layout=LAYOUT,
            admission=Admission(
                self.pool,
                block_size=BLOCK_SIZE,
                max_num_seqs=4,
                max_num_queued=max_num_queued,
                retry_after_s=0.5,
            ),
            compute=self.compute,
            tickets=self.tickets,
            limits=JobLimits(
                grant_timeout_s=grant_timeout_s,
                drain_timeout_s=drain_timeout_s,
                outbox_capacity=outbox_capacity,
            ),
            observer=self.ends,
            clock=lambda: 1.0,
        )
        self._numbers = itertools.count(1)

    def admit(self, num_tokens: int = 6, *, timeout_s: float = 60.0) -> PrefillJob:
        """Admits a prompt."""
        request = JobRequest(
            handoff_id=f"handoff-{next(self._numbers)}",
            prompt_token_ids=tuple(range(num_tokens)),
            push_from=0,
            num_output_tokens=0,
            sampling=SampleRequest(
                params=SamplingParams(temperature=0), seed=0, position=num_tokens
            ),
            timeout_s=timeout_s,
        )
        return self.jobs.admit(request, cast(DecodeSession, self.session))

    def ticket(self, job: PrefillJob, *, lease_s: float = 30.0) -> Ticket:
        """A new ticket that fits the job."""
        num_blocks = -(-job.request.num_tokens // BLOCK_SIZE)
        return Ticket(
            id=next(self._numbers).to_bytes(16, "big"),
            decode_incarnation=DECODE,
            prefill_incarnation=PREFILL,
            block_ids=tuple(range(num_blocks)),
            rows=RowRange(job.request.push_from, job.request.num_tokens),
            lease_s=lease_s,
            mac=b"m" * 16,
        )

    def granted(self, num_tokens: int = 6, *, lease_s: float = 30.0) -> PrefillJob:
        """A job that computes."""
        job = self.admit(num_tokens)
        self.jobs.grant(job, self.ticket(job, lease_s=lease_s))
        assert job.machine.state is JobState.COMPUTING
        return job

    def push_of(self, job: PrefillJob) -> FakePush:
        """The job's open ticket."""
        return self.session.pusher.pushes[job.ticket_id]

    def sample(self, job: PrefillJob) -> None:
        """Lets the compute thread finish the job."""
        del self.compute.jobs[job.job_id]
        self.jobs.on_compute_result(
            Sampled(job_id=job.job_id, token_id=5, started_s=2.0, sampled_s=3.0)
        )

    def leave_compute(self, job: PrefillJob) -> None:
        """Lets the compute thread obey a removal."""
        assert job.job_id in self.compute.removed
        del self.compute.jobs[job.job_id]
        self.jobs.on_compute_result(Removed(job_id=job.job_id))

    def fail_step(self, job: PrefillJob, *, layer: int | None = 2) -> None:
        """Lets the job's step raise."""
        del self.compute.jobs[job.job_id]
        self.jobs.on_compute_result(
            StepFailed(job_id=job.job_id, layer=layer, message="RuntimeError")
        )

    def quiet(self, job: PrefillJob) -> None:
        """Lets the push pipeline be quiet about a revoked ticket."""
        self.push_of(job).on_quiet[0]()

    def state(self, job: PrefillJob) -> JobState | None:
        """How the job ended; None while it has not."""
        return self.ends.states.get(job.job_id)

    def is_whole(self) -> bool:
        """Whether nothing is held for anybody."""
        return (
            self.pool.num_free == NUM_BLOCKS
            and self.jobs.num_active == self.jobs.num_queued == self.session.num_jobs == 0
        )


async def messages_of(job: PrefillJob) -> list[pb.PrefillResponse]:
    """All messages of an ended job."""
    messages = []
    while (message := await job.outbox.next_message()) is not None:
        messages.append(message)
    return messages


async def kinds_of(job: PrefillJob) -> list[str]:
    """Kinds of all messages of an ended job."""
    return [str(message.WhichOneof("message")) for message in await messages_of(job)]
