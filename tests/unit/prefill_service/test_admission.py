"""The queue before the compute thread: order, blocks, slots, bounds."""

from collections.abc import Callable

import pytest

from prefill_service.admission import Admission, Waiting
from prefill_service.scheduler import JobId
from serving_core.block_pool import BlockPool
from serving_core.errors import OverloadedError

BLOCK_SIZE = 4


class Started:
    """Notes who got blocks, in order."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}

    def noting(self, job_id: int) -> Callable[[tuple[int, ...]], None]:
        def note(block_ids: tuple[int, ...]) -> None:
            self.blocks[job_id] = block_ids

        return note

    def waiting(self, job_id: int, num_tokens: int) -> Waiting:
        return Waiting(job_id=JobId(job_id), num_tokens=num_tokens, on_reserved=self.noting(job_id))


def admission(num_blocks: int, *, max_num_seqs: int = 8, max_num_queued: int = 8) -> Admission:
    return Admission(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_queued=max_num_queued,
        retry_after_s=0.5,
    )


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_start_ready_reserves_blocks_for_the_whole_prompt(num_tokens: int, num_blocks: int) -> None:
    started, queue = Started(), admission(10)
    queue.enqueue(started.waiting(1, num_tokens))
    queue.start_ready()
    assert len(started.blocks[1]) == num_blocks


def test_small_prompt_does_not_overtake_the_head_of_the_queue() -> None:
    started, queue = Started(), admission(4)
    queue.enqueue(started.waiting(1, 12))
    queue.enqueue(started.waiting(2, 8))
    queue.enqueue(started.waiting(3, 4))
    queue.start_ready()
    assert list(started.blocks) == [1]
    assert queue.queued_job_ids() == (2, 3)
    assert queue.num_pending_tokens == 12
    queue.release(JobId(1))
    assert list(started.blocks) == [1, 2, 3]
    queue.release(JobId(2))
    queue.release(JobId(3))
    assert queue.num_running == 0


def test_slots_bound_the_jobs_that_hold_blocks() -> None:
    started, queue = Started(), admission(10, max_num_seqs=2)
    for job_id in (1, 2, 3):
        queue.enqueue(started.waiting(job_id, 1))
    queue.start_ready()
    assert list(started.blocks) == [1, 2]
    queue.release(JobId(2))
    assert list(started.blocks) == [1, 2, 3]


def test_full_queue_refuses_with_a_delay_and_takes_again_when_it_drains() -> None:
    started, queue = Started(), admission(1, max_num_queued=1)
    queue.enqueue(started.waiting(1, 4))
    queue.start_ready()
    queue.enqueue(started.waiting(2, 4))
    with pytest.raises(OverloadedError, match="the limit is 1") as refused:
        queue.enqueue(started.waiting(3, 4))
    assert refused.value.retry_after_s == 0.5
    queue.release(JobId(1))
    queue.enqueue(started.waiting(3, 4))
    assert list(started.blocks) == [1, 2]


def test_withdrawn_head_lets_the_next_one_start() -> None:
    started, queue = Started(), admission(2)
    queue.enqueue(started.waiting(1, 4))
    queue.start_ready()
    queue.enqueue(started.waiting(2, 8))
    queue.enqueue(started.waiting(3, 4))
    queue.start_ready()
    assert list(started.blocks) == [1]
    queue.withdraw(JobId(2))
    queue.withdraw(JobId(2))
    assert list(started.blocks) == [1, 3], "nobody needs to wait for the one who left"
