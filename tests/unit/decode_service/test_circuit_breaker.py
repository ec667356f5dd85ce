"""The breaker: every pair of state and event, what counts as a failure, when it lets through."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.circuit_breaker import (
    TRANSITIONS,
    BreakerEvent,
    BreakerSettings,
    BreakerState,
    CircuitBreaker,
    Trial,
)

SETTINGS = BreakerSettings(max_failures=3, pause_s=5.0)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
# Rows in the order of BreakerEvent, columns closed, open, half open; a dot means no change.
TABLE = """
failed_too_often  open    .          .
probe_began       .       half_open  .
probe_succeeded   .       .          closed
probe_failed      .       .          open
probe_undecided   .       .          open
process_replaced  .       closed     closed
"""


@dataclass(kw_only=True)
class Bench:
    """A breaker with a clock that the test moves."""

    now_s: float = 100.0
    told: list[BreakerState] = field(default_factory=list)
    breaker: CircuitBreaker = field(init=False)

    def __post_init__(self) -> None:
        """Make the breaker."""
        self.breaker = CircuitBreaker(
            SETTINGS,
            clock=lambda: self.now_s,
            on_transition=lambda state, _: self.told.append(state),
        )

    def fail(self, times: int = 1) -> None:
        """Failures one after the other."""
        for _ in range(times):
            self.breaker.begin().fail("test")

    def open(self) -> None:
        """Just opened."""
        self.fail(SETTINGS.max_failures)

    def probe(self) -> Trial:
        """Open, and the pause is over, and one request is on its way."""
        self.open()
        self.now_s += SETTINGS.pause_s
        return self.breaker.begin()


@pytest.fixture
def bench() -> Bench:
    """A closed breaker."""
    return Bench()


def test_table_is_the_drawn_one() -> None:
    expected = {}
    rows = [line.split() for line in TABLE.strip().splitlines()]
    for event, *targets in rows:
        for state, target in zip((CLOSED, OPEN, HALF_OPEN), targets, strict=True):
            if target != ".":
                expected[state, BreakerEvent(event)] = BreakerState(target)
    assert [event for event, *_ in rows] == [event.value for event in BreakerEvent]
    assert dict(TRANSITIONS) == expected


def test_failures_in_a_row_open_it(bench: Bench) -> None:
    bench.fail(2)
    assert bench.breaker.state is CLOSED
    assert bench.breaker.lets_through
    bench.fail()
    assert bench.breaker.state is OPEN
    assert not bench.breaker.lets_through
    assert bench.breaker.wait_s == SETTINGS.pause_s


def test_success_between_failures_starts_the_count_anew(bench: Bench) -> None:
    for _ in range(5):
        bench.fail(2)
        bench.breaker.begin().succeed()
    assert bench.breaker.state is CLOSED
    assert bench.told == []


def test_what_says_nothing_about_the_peer_never_opens_it(bench: Bench) -> None:
    bench.fail(2)
    for _ in range(100):
        bench.breaker.begin().abandon()
    assert bench.breaker.state is CLOSED
    bench.fail()  # nor does it forgive
    assert bench.breaker.state is OPEN


def test_one_broken_connection_is_one_failure_however_many_requests_it_carried(
    bench: Bench,
) -> None:
    trials = [bench.breaker.begin() for _ in range(50)]
    for trial in trials:
        trial.fail("the connection broke")
    assert bench.breaker.state is CLOSED
    bench.fail(2)
    assert bench.breaker.state is OPEN


def test_outcome_of_a_trial_counts_once(bench: Bench) -> None:
    bench.fail(2)
    trial = bench.breaker.begin()
    trial.abandon()
    trial.fail("late")
    assert bench.breaker.state is CLOSED


def test_open_lets_one_request_through_after_the_pause(bench: Bench) -> None:
    bench.open()
    bench.now_s += SETTINGS.pause_s - 0.001
    assert not bench.breaker.lets_through
    bench.now_s += 0.001
    assert bench.breaker.lets_through
    trial = bench.breaker.begin()
    assert trial.is_probe
    assert bench.breaker.state is HALF_OPEN
    assert not bench.breaker.lets_through


def test_probe_that_succeeds_closes_it(bench: Bench) -> None:
    bench.probe().succeed()
    assert bench.told == [OPEN, HALF_OPEN, CLOSED]
    bench.fail(2)
    assert bench.breaker.state is CLOSED


def test_probe_that_fails_opens_it_for_another_pause(bench: Bench) -> None:
    trial = bench.probe()
    bench.now_s += 1.0
    trial.fail("again")
    assert bench.told == [OPEN, HALF_OPEN, OPEN]
    assert bench.breaker.wait_s == SETTINGS.pause_s


def test_probe_that_says_nothing_lets_the_next_request_try_at_once(bench: Bench) -> None:
    bench.probe().abandon()
    assert bench.breaker.state is OPEN
    assert bench.breaker.lets_through


def test_probe_that_does_not_come_back_keeps_nobody_out_for_longer_than_a_pause(
    bench: Bench,
) -> None:
    lost = bench.probe()
    bench.now_s += SETTINGS.pause_s
    assert bench.breaker.lets_through
    second = bench.breaker.begin()
    assert not bench.breaker.lets_through
    second.succeed()
    lost.fail("an old story")  # older than what closed it, but the first since
    assert bench.breaker.state is CLOSED


def test_requests_from_before_it_opened_do_not_decide_a_probe(bench: Bench) -> None:
    old = [bench.breaker.begin() for _ in range(2)]
    bench.probe()
    old[0].succeed()
    old[1].fail("late")
    assert bench.breaker.state is HALF_OPEN


@pytest.mark.parametrize("is_probing", [False, True])
def test_another_process_starts_with_a_clean_record(bench: Bench, is_probing: bool) -> None:
    old = bench.probe()
    if not is_probing:
        old.fail("again")
    bench.breaker.process_replaced()
    assert bench.breaker.state is CLOSED
    old.fail("of the old process")
    bench.fail(2)
    assert bench.breaker.state is CLOSED
    bench.fail()
    assert bench.breaker.state is OPEN


def test_failures_of_the_old_process_do_not_count_against_the_new_one(bench: Bench) -> None:
    bench.fail(2)
    old = bench.breaker.begin()
    bench.breaker.process_replaced()
    old.fail("its connection broke")
    bench.fail(2)
    assert bench.breaker.state is CLOSED


OUTCOMES = ("succeed", "fail", "abandon", "wait", "begin", "replace")


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), st.integers(0, 3)), max_size=60))
def test_any_history_keeps_the_promises(steps: list[tuple[str, int]]) -> None:
    """It always lets through again after a pause, moves along the table, and probes one by one."""
    bench = Bench()
    running: list[Trial] = []
    for step, index in steps:
        if step == "wait":
            bench.now_s += SETTINGS.pause_s / 2
        elif step == "replace":
            bench.breaker.process_replaced()
        elif step == "begin":
            if bench.breaker.lets_through:
                running.append(bench.breaker.begin())
                assert bench.breaker.state is CLOSED or not bench.breaker.lets_through
        elif running:
            trial = running.pop(index % len(running))
            {"succeed": trial.succeed, "abandon": trial.abandon}.get(
                step, lambda trial=trial: trial.fail("test")
            )()
        assert 0 <= bench.breaker.wait_s <= SETTINGS.pause_s
        assert (bench.breaker.state is CLOSED) <= bench.breaker.lets_through
    moves = set(itertools.pairwise([CLOSED, *bench.told]))
    assert moves <= {(state, target) for (state, _), target in TRANSITIONS.items()}
