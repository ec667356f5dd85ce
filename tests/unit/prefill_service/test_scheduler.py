"""The chunk scheduler: budget, mixing, order, removal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_service.scheduler import Chunk, ChunkScheduler, JobId


def drain(scheduler: ChunkScheduler) -> list[tuple[Chunk, ...]]:
    steps = []
    while step := scheduler.schedule():
        steps.append(step)
    return steps


def test_schedule_long_prompt_is_cut_at_the_budget() -> None:
    scheduler = ChunkScheduler(max_num_batched_tokens=4)
    scheduler.add(JobId(1), 10)
    steps = drain(scheduler)
    assert [(c.index, c.start, c.end, c.is_last) for (c,) in steps] == [
        (0, 0, 4, False),
        (1, 4, 8, False),
        (2, 8, 10, True),
    ]


def test_schedule_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    scheduler = ChunkScheduler(max_num_batched_tokens=8)
    scheduler.add(JobId(1), 5)
    scheduler.add(JobId(2), 5)
    first, second = drain(scheduler)
    assert [(c.job_id, c.start, c.num_tokens, c.is_last) for c in first] == [
        (1, 0, 5, True),
        (2, 0, 3, False),
    ]
    assert [(c.job_id, c.start, c.num_tokens, c.is_last) for c in second] == [(2, 3, 2, True)]


def test_schedule_late_short_prompt_waits_for_the_earlier_one() -> None:
    scheduler = ChunkScheduler(max_num_batched_tokens=4)
    scheduler.add(JobId(1), 8)
    scheduler.schedule()
    scheduler.add(JobId(2), 1)
    assert [c.job_id for c in scheduler.schedule()] == [1]
    assert [c.job_id for c in scheduler.schedule()] == [2]


def test_remove_between_chunks_schedules_no_more_of_it() -> None:
    scheduler = ChunkScheduler(max_num_batched_tokens=4)
    scheduler.add(JobId(1), 100)
    scheduler.add(JobId(2), 3)
    scheduler.schedule()
    assert scheduler.remove(JobId(1))
    assert not scheduler.remove(JobId(1))
    assert [c.job_id for step in drain(scheduler) for c in step] == [2]
    assert len(scheduler) == 0


def test_schedule_without_prompts_is_empty() -> None:
    assert ChunkScheduler(max_num_batched_tokens=1).schedule() == ()


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_add_without_tokens_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"has {num_tokens} tokens"):
        ChunkScheduler(max_num_batched_tokens=4).add(JobId(1), num_tokens)


def test_add_twice_is_refused() -> None:
    scheduler = ChunkScheduler(max_num_batched_tokens=4)
    scheduler.add(JobId(7), 1)
    with pytest.raises(ValueError, match="job 7 is queued already"):
        scheduler.add(JobId(7), 1)


def test_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        ChunkScheduler(max_num_batched_tokens=0)


@given(
    budget=st.integers(1, 17),
    arrivals=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
)
def test_schedule_any_arrivals_compute_every_token_once_in_order(
    budget: int, arrivals: list[tuple[int, int, bool]]
) -> None:
    """Whatever arrives and leaves between the steps, kept prompts are tiled exactly once."""
    scheduler = ChunkScheduler(max_num_batched_tokens=budget)
    lengths = {JobId(i): num_tokens for i, (num_tokens, _, _) in enumerate(arrivals)}
    removed: set[JobId] = set()
    chunks: list[Chunk] = []

    def step() -> bool:
        scheduled = scheduler.schedule()
        num_tokens = sum(c.num_tokens for c in scheduled)
        assert num_tokens <= budget
        assert num_tokens == budget or len(scheduler) == 0, "the budget is spent while work waits"
        assert [c.job_id for c in scheduled] == sorted({c.job_id for c in scheduled})
        assert not removed & {c.job_id for c in scheduled}
        chunks.extend(scheduled)
        return bool(scheduled)

    for job_id, (num_tokens, num_steps_after, leaves) in enumerate(arrivals):
        scheduler.add(JobId(job_id), num_tokens)
        for _ in range(num_steps_after):
            step()
        if leaves and scheduler.remove(JobId(job_id)):
            removed.add(JobId(job_id))
    while step():
        pass

    for job_id, num_tokens in lengths.items():
        own = [c for c in chunks if c.job_id == job_id]
        assert [c.index for c in own] == list(range(len(own)))
        rows = [row for c in own for row in range(c.start, c.end)]
        assert rows == list(range(len(rows)))
        if job_id not in removed:
            assert len(rows) == num_tokens
            assert [c.is_last for c in own] == [False] * (len(own) - 1) + [True]
    assert len(scheduler) == 0
