"""Whatever happens to jobs in whatever order: each ends exactly once and every block returns."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.session import JobState
from prefill_service.job import PrefillJob
from prefill_service.kv_push import PushFailed
from serving_core.errors import OverloadedError
from tandem.v1 import errors_pb2
from tests.unit.prefill_service.job_world import NUM_BLOCKS, World, kinds_of

EVENTS = [
    "admit",
    "admit",
    "grant",
    "grant",
    "bad_grant",
    "sample",
    "report",
    "fail_step",
    "fail_push",
    "revoke",
    "fail",
    "renew",
    "leave_compute",
    "quiet",
]


def apply(world: World, job: PrefillJob, event: str) -> None:
    """Lets an event happen to a job, if the outside world could bring it about now."""
    in_compute = job.job_id in world.compute.jobs
    push = world.session.pusher.pushes.get(job.ticket_id)
    is_revoked = push is not None and bool(push.on_quiet)
    if event == "grant" and job.ticket is None:
        world.jobs.grant(job, world.ticket(job))
    elif event == "bad_grant":
        world.jobs.grant(job, world.ticket(job, lease_s=1.0))
    elif event == "sample" and in_compute:
        world.sample(job)
    elif event == "fail_step" and in_compute:
        world.fail_step(job)
    elif event == "leave_compute" and in_compute and job.job_id in world.compute.removed:
        world.leave_compute(job)
    elif event == "report" and push is not None and not push.is_closed and not is_revoked:
        if job.num_rows_reported == 0:
            push.report_all()
    elif event == "fail_push" and push is not None and not push.is_closed:
        push.on_failure(PushFailed(layer=0, rank=0, is_lease_expired=False, message="planned"))
    elif event == "revoke":
        world.jobs.revoke(job, "test")
    elif event == "fail":
        world.jobs.fail(job, errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, "planned")
    elif event == "renew" and job.ticket is not None:
        world.jobs.renew(job, job.ticket_id)
    elif event == "quiet" and is_revoked and not job.push_quiet:
        world.quiet(job)


def finish(world: World, jobs: list[PrefillJob]) -> None:
    """Revokes everybody and lets compute thread and pipeline answer."""
    for event in ("revoke", "leave_compute", "quiet"):
        for job in jobs:
            apply(world, job, event)


async def scenario(steps: list[tuple[str, int, int]]) -> None:
    world = World(max_num_queued=3)
    jobs: list[PrefillJob] = []
    for event, which, num_tokens in steps:
        if event == "admit":
            try:
                jobs.append(world.admit(num_tokens))
            except OverloadedError:
                assert world.jobs.num_queued == 3
        elif jobs:
            apply(world, jobs[which % len(jobs)], event)
        world.pool.check_integrity()
        held = sum(len(job.block_ids) for job in jobs if job.job_id not in world.ends.states)
        assert world.pool.num_free + held == NUM_BLOCKS
    finish(world, jobs)
    assert world.is_whole()
    assert set(world.ends.states) == {job.job_id for job in jobs}
    for job in jobs:
        kinds = await kinds_of(job)
        ends = [kind for kind in kinds if kind in ("drained", "failed")]
        assert ends == kinds[-1:] if world.state(job) is not JobState.DONE else ends == []
        if world.state(job) is JobState.DONE:
            assert "first" in kinds
        assert world.tickets.live_job(job.ticket_id) is None


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 5), st.integers(1, 4 * NUM_BLOCKS)),
        max_size=60,
    )
)
def test_jobs_any_order_of_events_ends_each_once_and_returns_every_block(
    steps: list[tuple[str, int, int]],
) -> None:
    asyncio.run(scenario(steps))
