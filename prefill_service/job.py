"""One prefill job: what was asked, what it holds, and where it is in its life.

    QUEUED -> COMPUTING -> PUSHING -> DONE
       |          |           |
       +----------+-----------+--> DRAINING -> FAILED | CANCELLED

A job is owned by the event loop thread. `jobs.py` drives it; the table of transitions is
kv_transfer's.
"""

import asyncio
from dataclasses import dataclass, field

from kv_transfer.session import JobState, StateMachine, job_state_machine
from kv_transfer.ticket import Ticket
from prefill_service.kv_push import JobPush
from prefill_service.outbox import Outbox
from prefill_service.scheduler import JobId
from prefill_service.sessions import DecodeSession
from serving_core.sampler import SampleRequest
from tandem.v1 import prefill_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A validated Start.

    Attributes:
        handoff_id: Decode's name of the attempt, for logs.
        prompt_token_ids: All tokens to compute; never empty.
        push_from: First token row that is pushed; below the number of tokens.
        num_output_tokens: How many of the last tokens were generated earlier.
        sampling: How to choose the token after the prompt.
        timeout_s: Time left for the request, counted from its arrival; at most a day.
    """

    handoff_id: str
    prompt_token_ids: tuple[int, ...]
    push_from: int
    num_output_tokens: int
    sampling: SampleRequest
    timeout_s: float

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)


@dataclass(slots=True)
class JobTimers:
    """The alarms of one job by purpose; setting one replaces its predecessor."""

    _handles: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def set(self, purpose: str, handle: asyncio.TimerHandle) -> None:
        """Keep the handle and cancel the one it replaces."""
        self.cancel(purpose)
        self._handles[purpose] = handle

    def cancel(self, purpose: str) -> None:
        """Cancel one alarm; harmless when it is not set."""
        if (handle := self._handles.pop(purpose, None)) is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        """Cancel every alarm."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillJob:
    """A request on its way through the service.

    Attributes:
        job_id: Unique in this process.
        request: What was asked.
        session: The decode service that asked.
        outbox: Messages for its stream.
        arrived_s: Monotonic time of Start.
        num_rows_to_push: Rows summed over all layers and components.
        machine: Where the job is in its life.
        block_ids: Own blocks; empty until reserved.
        ticket: Decode's grant; None while the job waits for it.
        push: The job's place in the push pipeline; None like `ticket`.
        in_compute: Whether the compute thread may touch the own blocks.
        push_quiet: Whether no write of the ticket can happen any more.
        is_sampled: Whether First was sent.
        num_rows_reported: Rows that receipts have covered so far, counted like the total.
        last_message: What tells decode how an unsuccessful job ended.
        end_state: FAILED or CANCELLED once the job drains.
        drained: Set together with `push_quiet`, for those who wait.
        timers: Pending alarms: the deadline, and the grant or lease.
    """

    job_id: JobId
    request: JobRequest
    session: DecodeSession
    outbox: Outbox
    arrived_s: float
    num_rows_to_push: int
    machine: StateMachine[JobState] = field(default_factory=job_state_machine)
    block_ids: tuple[int, ...] = ()
    ticket: Ticket | None = None
    push: JobPush | None = None
    in_compute: bool = False
    push_quiet: bool = False
    is_sampled: bool = False
    num_rows_reported: int = 0
    last_message: pb.PrefillResponse = field(default_factory=pb.PrefillResponse)
    end_state: JobState = JobState.FAILED
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    timers: JobTimers = field(default_factory=JobTimers)

    @property
    def is_ending(self) -> bool:
        """Whether the outcome is decided already."""
        return self.machine.state not in (JobState.QUEUED, JobState.COMPUTING, JobState.PUSHING)

    @property
    def ticket_id(self) -> bytes:
        """The ticket's id; empty when none was granted."""
        return self.ticket.id if self.ticket is not None else b""
