"""Both transition tables, every pair of states."""

import itertools
from enum import Enum

import pytest

from kv_transfer.errors import IllegalTransitionError
from kv_transfer.session import (
    JOB_TRANSITIONS,
    RESERVATION_TRANSITIONS,
    JobState,
    ReservationState,
    StateMachine,
    job_state_machine,
    reservation_state_machine,
)

# Written out again from the diagrams, so that a change of a table is a change of a test.
RESERVATION_ARROWS = {
    "RESERVED>RECEIVING",
    "RESERVED>REVOKING",
    "RECEIVING>COMMITTED",
    "RECEIVING>REVOKING",
    "COMMITTED>CLOSED",
    "REVOKING>QUARANTINED",
    "REVOKING>FREED",
    "QUARANTINED>FREED",
}
JOB_ARROWS = {
    "QUEUED>COMPUTING",
    "QUEUED>DRAINING",
    "COMPUTING>PUSHING",
    "COMPUTING>DRAINING",
    "PUSHING>DONE",
    "PUSHING>DRAINING",
    "DRAINING>FAILED",
    "DRAINING>CANCELLED",
}
PAIRS = [
    *(
        (RESERVATION_TRANSITIONS, RESERVATION_ARROWS, *pair)
        for pair in itertools.product(ReservationState, repeat=2)
    ),
    *((JOB_TRANSITIONS, JOB_ARROWS, *pair) for pair in itertools.product(JobState, repeat=2)),
]


@pytest.mark.parametrize(("table", "arrows", "state", "target"), PAIRS)
def test_machine_each_pair_of_states_moves_only_along_an_arrow(
    table: dict[Enum, frozenset[Enum]], arrows: set[str], state: Enum, target: Enum
) -> None:
    machine = StateMachine(table, state)
    if f"{state.name}>{target.name}" in arrows:
        assert machine.can(target)
        machine.to(target)
        assert machine.state is target
    else:
        assert not machine.can(target)
        with pytest.raises(IllegalTransitionError, match=f"{state.name} to {target.name}"):
            machine.to(target)
        assert machine.state is state


@pytest.mark.parametrize(
    ("table", "terminal"),
    [
        (RESERVATION_TRANSITIONS, {ReservationState.CLOSED, ReservationState.FREED}),
        (JOB_TRANSITIONS, {JobState.DONE, JobState.FAILED, JobState.CANCELLED}),
    ],
)
def test_machine_is_terminal_in_the_final_states_only(
    table: dict[Enum, frozenset[Enum]], terminal: set[Enum]
) -> None:
    assert {state for state in table if StateMachine(table, state).is_terminal} == terminal


def test_machines_start_where_the_diagrams_do() -> None:
    assert reservation_state_machine().state is ReservationState.RESERVED
    assert job_state_machine().state is JobState.QUEUED


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        JOB_TRANSITIONS[JobState.DONE] = frozenset({JobState.QUEUED})  # type: ignore[index]
