"""The life of a job, event by event: compute thread and pipeline answer when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kv_transfer.errors import PushQueueFullError, PushRefusedError
from kv_transfer.session import JobState
from kv_transfer.spans import RowRange
from prefill_service.job import PrefillJob
from prefill_service.kv_push import PushFailed
from serving_core.errors import DrainingError, OverloadedError, PrefillUnavailableError
from tandem.v1 import errors_pb2
from tests.unit.prefill_service.job_world import NUM_BLOCKS, World, kinds_of, messages_of


async def failure_of(job: PrefillJob) -> errors_pb2.Failure:
    messages = await messages_of(job)
    assert messages[-1].WhichOneof("message") == "failed"
    return messages[-1].failed.failure


async def test_job_whose_rows_are_reported_after_the_token_is_done_with_the_last_row() -> None:
    world = World()
    job = world.granted()
    world.push_of(job).report(RowRange(0, 6), 0)
    world.push_of(job).report(RowRange(0, 6), 1)
    world.sample(job)
    world.push_of(job).report(RowRange(0, 4), 2)
    assert job.machine.state is JobState.PUSHING
    world.push_of(job).report(RowRange(4, 6), 2)
    assert world.state(job) is JobState.DONE
    assert world.push_of(job).is_closed
    assert world.tickets.is_used(job.ticket_id)
    assert world.is_whole()
    assert world.jobs.num_pushed_bytes == world.ends.num_bytes == 3 * 6 * 16
    assert await kinds_of(job) == ["admitted", "starting_soon", "progress", "first", "progress"]


async def test_job_whose_rows_are_reported_before_the_token_is_done_with_the_token() -> None:
    world = World()
    job = world.granted()
    world.push_of(job).report_all()
    assert world.state(job) is None
    world.sample(job)
    assert world.state(job) is JobState.DONE
    first = (await messages_of(job))[-1].first
    assert list(first.token_ids) == [5]
    assert first.queue_time.ToMilliseconds() == first.compute_time.ToMilliseconds() == 1000


async def test_admitted_tells_how_many_tokens_wait_before_the_job() -> None:
    world = World()
    world.admit(4 * NUM_BLOCKS)
    jobs = [world.admit(7), world.admit(5)]
    messages = [await job.outbox.next_message() for job in jobs]
    assert [m.admitted.num_pending_tokens for m in messages if m is not None] == [0, 7]
    assert world.jobs.num_queued == 2
    assert world.jobs.num_active == 1


async def test_revoke_in_the_queue_is_drained_at_once_and_frees_the_place() -> None:
    world = World(max_num_queued=1)
    running = world.admit(4 * NUM_BLOCKS)
    waiting = world.admit()
    with pytest.raises(OverloadedError):
        world.admit()
    world.jobs.revoke(waiting, "test")
    assert world.state(waiting) is JobState.CANCELLED
    assert await kinds_of(waiting) == ["admitted", "drained"]
    world.admit()
    world.jobs.revoke(running, "test")
    assert await kinds_of(running) == ["admitted", "starting_soon", "drained"]


async def test_revoke_while_computing_frees_blocks_only_after_both_have_let_go() -> None:
    for first in ("compute", "push"):
        world = World()
        job = world.granted()
        world.jobs.revoke(job, "test")
        world.jobs.revoke(job, "again")
        assert job.machine.state is JobState.DRAINING
        assert len(job.outbox) == 2, "Drained only when the push is quiet"
        if first == "compute":
            world.leave_compute(job)
        else:
            world.quiet(job)
            assert await kinds_of(job) == ["admitted", "starting_soon", "drained"]
        assert world.pool.num_free < NUM_BLOCKS
        assert world.state(job) is None
        if first == "compute":
            world.quiet(job)
        else:
            world.leave_compute(job)
        assert world.state(job) is JobState.CANCELLED
        assert world.is_whole()


async def test_results_that_come_after_a_revoke_change_nothing() -> None:
    world = World()
    job = world.granted()
    world.jobs.revoke(job, "test")
    world.push_of(job).report_all()
    world.sample(job)
    world.push_of(job).on_failure(
        PushFailed(layer=1, rank=0, is_lease_expired=False, message="late")
    )
    world.jobs.renew(job, job.ticket_id)
    world.jobs.grant(job, world.ticket(job))
    world.quiet(job)
    assert world.state(job) is JobState.CANCELLED
    assert await kinds_of(job) == ["admitted", "starting_soon", "drained"]
    assert world.is_whole()


async def test_failed_step_is_told_with_layer_and_rank_after_the_push_is_quiet() -> None:
    world = World()
    job = world.granted()
    world.fail_step(job)
    assert world.compute.removed == [], "the compute thread has let go already"
    assert world.state(job) is None
    world.quiet(job)
    failure = await failure_of(job)
    assert failure.reason == errors_pb2.FAILURE_REASON_COMPUTE_FAILED
    assert failure.message == "model step failed at layer 2 on rank 0: RuntimeError"
    assert (failure.layer, failure.rank) == (2, 0)
    assert world.state(job) is JobState.FAILED
    assert world.is_whole()


async def test_failed_step_outside_the_layers_names_no_layer() -> None:
    world = World()
    job = world.granted()
    world.fail_step(job, layer=None)
    world.quiet(job)
    failure = await failure_of(job)
    assert not failure.HasField("layer")
    assert "outside the layers" in failure.message


@pytest.mark.parametrize(
    ("is_lease_expired", "reason"),
    [
        (True, errors_pb2.FAILURE_REASON_LEASE_EXPIRED),
        (False, errors_pb2.FAILURE_REASON_WRITE_FAILED),
    ],
)
async def test_failed_push_is_told_with_its_place(
    is_lease_expired: bool, reason: errors_pb2.FailureReason
) -> None:
    world = World()
    job = world.granted()
    world.sample(job)
    world.push_of(job).on_failure(
        PushFailed(layer=1, rank=0, is_lease_expired=is_lease_expired, message="planned")
    )
    world.quiet(job)
    failure = await failure_of(job)
    assert failure.reason == reason
    assert (failure.layer, failure.rank, failure.message) == (1, 0, "planned")
    assert world.is_whole()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PushQueueFullError("full"), errors_pb2.FAILURE_REASON_OVERLOADED),
        (PushRefusedError("ticket.id", 1, 2), errors_pb2.FAILURE_REASON_TICKET_REJECTED),
    ],
)
async def test_pipeline_that_refuses_a_ticket_fails_the_job(
    error: PushQueueFullError | PushRefusedError, reason: errors_pb2.FailureReason
) -> None:
    world = World()
    world.session.pusher.error = error
    job = world.admit()
    ticket = world.ticket(job)
    world.jobs.grant(job, ticket)
    assert (await failure_of(job)).reason == reason
    assert world.compute.jobs == {}
    assert world.tickets.is_used(ticket.id)
    assert world.is_whole()


async def test_ticket_of_a_live_job_is_refused_for_another() -> None:
    world = World()
    holder = world.granted()
    thief = world.admit()
    assert holder.ticket is not None
    world.jobs.grant(thief, replace(world.ticket(thief), id=holder.ticket.id))
    assert (await failure_of(thief)).reason == errors_pb2.FAILURE_REASON_TICKET_REJECTED
    assert holder.machine.state is JobState.COMPUTING
    assert world.tickets.live_job(holder.ticket_id) == holder.job_id


async def test_renew_reaches_the_push_and_restarts_the_lease() -> None:
    world = World()
    job = world.granted(lease_s=0.2)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 0.4
    while loop.time() < until_s:
        world.jobs.renew(job, job.ticket_id)
        await asyncio.sleep(0.02)
    assert job.machine.state is JobState.COMPUTING
    assert world.push_of(job).num_renewals > 2
    await asyncio.wait_for(wait_state(job, JobState.DRAINING), 2)
    world.quiet(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_LEASE_EXPIRED


async def test_freed_slots_reach_the_push() -> None:
    world = World()
    job = world.granted()
    world.jobs.free_slots(job, job.ticket_id, [2, 0])
    world.jobs.free_slots(job, job.ticket_id, [1])
    assert world.push_of(job).freed_slots == [2, 0, 1]
    assert job.machine.state is JobState.COMPUTING


@pytest.mark.parametrize("ticket_id", [b"", b"x" * 16])
async def test_freed_slots_of_another_ticket_fail_the_job(ticket_id: bytes) -> None:
    world = World()
    job = world.granted()
    world.jobs.free_slots(job, ticket_id, [0])
    world.quiet(job)
    failure = await failure_of(job)
    assert failure.reason == errors_pb2.FAILURE_REASON_INVALID_REQUEST
    assert "slots_freed.ticket_id" in failure.message
    assert not world.push_of(job).freed_slots


async def test_freed_slots_before_the_grant_fail_the_job() -> None:
    world = World()
    job = world.admit()
    world.jobs.free_slots(job, b"", [0])
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_INVALID_REQUEST


@pytest.mark.parametrize("slots", [[], [1, 1], list(range(1 << 17))])
async def test_list_of_freed_slots_that_is_none_fails_the_job(slots: list[int]) -> None:
    world = World()
    job = world.granted()
    world.jobs.free_slots(job, job.ticket_id, slots)
    world.quiet(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_INVALID_REQUEST
    assert not world.push_of(job).freed_slots


async def test_slots_that_the_push_refuses_fail_the_job_and_no_other() -> None:
    world = World()
    job, other = world.granted(), world.granted()
    world.push_of(job).refused_slots = {3}
    world.jobs.free_slots(job, job.ticket_id, [3])
    world.quiet(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_INVALID_REQUEST
    assert other.machine.state is JobState.COMPUTING


async def test_freed_slots_after_the_end_change_nothing() -> None:
    world = World()
    job = world.granted()
    world.push_of(job).report_all()
    world.sample(job)
    world.jobs.free_slots(job, job.ticket_id, [0])
    world.jobs.free_slots(job, b"another", [])
    assert world.state(job) is JobState.DONE
    assert not world.push_of(job).freed_slots
    assert world.is_whole()


async def test_broken_link_makes_no_drained_of_a_revoke() -> None:
    world = World()
    job = world.granted()
    world.session.pusher.is_broken = True
    world.jobs.revoke(job, "client left")
    world.quiet(job)
    failure = await failure_of(job)
    assert failure.reason == errors_pb2.FAILURE_REASON_LINK_BROKEN
    assert "may still land" in failure.message


async def test_broken_link_overrides_the_reason_and_keeps_text_and_layer() -> None:
    world = World()
    job = world.granted()
    world.session.pusher.is_broken = True
    world.push_of(job).on_failure(
        PushFailed(layer=3, rank=0, is_lease_expired=False, message="push failed at layer 3")
    )
    world.quiet(job)
    failure = await failure_of(job)
    assert failure.reason == errors_pb2.FAILURE_REASON_LINK_BROKEN
    assert failure.layer == 3
    assert "push failed at layer 3" in failure.message
    assert "may still land" in failure.message


async def test_link_that_breaks_after_the_end_of_the_last_write_is_still_told() -> None:
    """What counts is the state of the link when the push is quiet, not when the job failed."""
    world = World()
    job = world.granted()
    world.jobs.revoke(job, "client left")
    world.session.pusher.is_broken = True
    world.quiet(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_LINK_BROKEN


async def test_broken_link_means_nothing_for_a_job_that_never_pushed() -> None:
    world = World()
    world.session.pusher.is_broken = True
    job = world.admit()
    world.jobs.revoke(job, "client left")
    assert (await kinds_of(job))[-1] == "drained"


async def test_broken_link_means_nothing_for_a_job_whose_rows_are_all_reported() -> None:
    world = World()
    job = world.granted()
    world.push_of(job).report_all()
    world.session.pusher.is_broken = True
    world.sample(job)
    assert world.state(job) is JobState.DONE
    assert (await kinds_of(job))[-1] == "first"


async def wait_state(job: PrefillJob, state: JobState) -> None:
    while job.machine.state is not state:  # noqa: ASYNC110 - the alarm is the loop's own
        await asyncio.sleep(0.005)


async def test_deadline_while_computing_fails_the_job_and_removes_it() -> None:
    world = World()
    job = world.admit(timeout_s=0.05)
    world.jobs.grant(job, world.ticket(job))
    await asyncio.wait_for(wait_state(job, JobState.DRAINING), 2)
    assert world.compute.removed == [job.job_id]
    world.quiet(job)
    world.leave_compute(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED


async def test_alarms_of_an_ended_job_never_fire() -> None:
    world = World(grant_timeout_s=0.02)
    job = world.admit(timeout_s=0.05)
    world.jobs.grant(job, world.ticket(job, lease_s=0.05))
    world.push_of(job).report_all()
    world.sample(job)
    await asyncio.sleep(0.1)
    assert world.state(job) is JobState.DONE
    assert (await kinds_of(job))[-1] in ("first", "progress")


async def test_decode_that_reads_too_slowly_fails_the_job() -> None:
    world = World(outbox_capacity=3)
    job = world.granted()
    world.push_of(job).report(RowRange(0, 1), 0)
    world.push_of(job).report(RowRange(1, 2), 0)
    world.quiet(job)
    assert (await failure_of(job)).reason == errors_pb2.FAILURE_REASON_OVERLOADED


async def test_unary_revoke_waits_until_the_push_is_quiet() -> None:
    world = World()
    job = world.granted()
    revoking = asyncio.create_task(world.jobs.revoke_ticket(job.ticket_id, "test"))
    await asyncio.sleep(0)
    assert job.is_ending
    assert not revoking.done()
    world.quiet(job)
    await revoking
    await world.jobs.revoke_ticket(job.ticket_id, "again")
    world.leave_compute(job)
    assert world.is_whole()


async def test_push_that_does_not_become_quiet_is_unavailable_and_keeps_its_blocks() -> None:
    world = World(drain_timeout_s=0.05)
    job = world.granted()
    with pytest.raises(PrefillUnavailableError, match="has not ended within"):
        await world.jobs.revoke_ticket(job.ticket_id, "test")
    with pytest.raises(PrefillUnavailableError):
        await kinds_of(job)
    world.leave_compute(job)
    assert world.pool.num_free < NUM_BLOCKS
    assert world.state(job) is None
    world.quiet(job)
    assert world.state(job) is JobState.CANCELLED
    assert world.is_whole()


async def test_fail_session_ends_its_jobs_in_every_phase() -> None:
    world = World()
    computing, waiting = world.granted(), world.admit()
    queued = world.admit(4 * NUM_BLOCKS)
    world.jobs.fail_session(computing.session, "decode died")
    world.leave_compute(computing)
    world.quiet(computing)
    for job in (computing, waiting, queued):
        failure = await failure_of(job)
        assert failure.reason == errors_pb2.FAILURE_REASON_WRITE_FAILED
        assert failure.message == "decode died"
    assert world.is_whole()


async def test_drain_lets_started_jobs_finish_and_refuses_the_others() -> None:
    world = World()
    started = world.granted()
    queued = world.admit(4 * NUM_BLOCKS)
    draining = asyncio.create_task(world.jobs.drain(grace_s=5.0))
    assert (await failure_of(queued)).reason == errors_pb2.FAILURE_REASON_DRAINING
    with pytest.raises(DrainingError):
        world.admit()
    world.push_of(started).report_all()
    world.sample(started)
    assert await draining
    assert world.state(started) is JobState.DONE


async def test_drain_fails_what_outlives_the_grace_time_and_says_what_is_left() -> None:
    world = World(drain_timeout_s=0.05)
    job = world.granted()
    assert not await world.jobs.drain(grace_s=0.0)
    assert job.machine.state is JobState.DRAINING
    world.leave_compute(job)
    world.quiet(job)
    assert await world.jobs.drain(grace_s=0.0)
    assert world.state(job) is JobState.FAILED
