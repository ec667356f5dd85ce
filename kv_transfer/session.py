"""The life cycles of the two sides of a hand-off, each as one transition table.

A reservation of the decode service:

    RESERVED ──first receipt──▶ RECEIVING ──all verified──▶ COMMITTED ──request ends──▶ CLOSED
       │                            │
       └───────────any fault────────┴──▶ REVOKING ──drained, or writer dead──▶ FREED
                                            │                                    ▲
                                            └─no answer─▶ QUARANTINED ──the same─┘

A job of the prefill service:

    QUEUED ──granted──▶ COMPUTING ──sampled──▶ PUSHING ──all written──▶ DONE
       │                    │                     │
       └────────────────────┴──fault or revoke────┴──▶ DRAINING ──quiet──▶ FAILED | CANCELLED
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

from kv_transfer.errors import IllegalTransitionError


class ReservationState(Enum):
    """Where a reservation of decode memory is in its life."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    CLOSED = "closed"
    REVOKING = "revoking"
    QUARANTINED = "quarantined"
    FREED = "freed"


class JobState(Enum):
    """Where a prefill job is in its life."""

    QUEUED = "queued"
    COMPUTING = "computing"
    PUSHING = "pushing"
    DONE = "done"
    DRAINING = "draining"
    FAILED = "failed"
    CANCELLED = "cancelled"


RESERVATION_TRANSITIONS: Mapping[ReservationState, frozenset[ReservationState]] = MappingProxyType(
    {
        ReservationState.RESERVED: frozenset(
            {ReservationState.RECEIVING, ReservationState.REVOKING}
        ),
        ReservationState.RECEIVING: frozenset(
            {ReservationState.COMMITTED, ReservationState.REVOKING}
        ),
        ReservationState.COMMITTED: frozenset({ReservationState.CLOSED}),
        ReservationState.REVOKING: frozenset(
            {ReservationState.QUARANTINED, ReservationState.FREED}
        ),
        ReservationState.QUARANTINED: frozenset({ReservationState.FREED}),
        ReservationState.CLOSED: frozenset(),
        ReservationState.FREED: frozenset(),
    }
)

JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = MappingProxyType(
    {
        JobState.QUEUED: frozenset({JobState.COMPUTING, JobState.DRAINING}),
        JobState.COMPUTING: frozenset({JobState.PUSHING, JobState.DRAINING}),
        JobState.PUSHING: frozenset({JobState.DONE, JobState.DRAINING}),
        JobState.DRAINING: frozenset({JobState.FAILED, JobState.CANCELLED}),
        JobState.DONE: frozenset(),
        JobState.FAILED: frozenset(),
        JobState.CANCELLED: frozenset(),
    }
)

StateT = TypeVar("StateT", bound=Enum)


class StateMachine(Generic[StateT]):
    """A state that moves along one transition table only. Not thread-safe."""

    __slots__ = ("_state", "_table")

    def __init__(self, table: Mapping[StateT, frozenset[StateT]], initial: StateT) -> None:
        """Start in `initial`; the table lists the successors of every state."""
        self._table = table
        self._state = initial

    @property
    def state(self) -> StateT:
        """Where it is now."""
        return self._state

    @property
    def is_terminal(self) -> bool:
        """Whether no transition is left."""
        return not self._table[self._state]

    def can(self, target: StateT) -> bool:
        """Tell whether `to(target)` is allowed now."""
        return target in self._table[self._state]

    def to(self, target: StateT) -> None:
        """Move to a successor state.

        Raises:
            IllegalTransitionError: The table has no such transition; the state stays.
        """
        if not self.can(target):
            raise IllegalTransitionError(self._state.name, target.name)
        self._state = target


def reservation_state_machine() -> StateMachine[ReservationState]:
    """Return a machine for one new reservation."""
    return StateMachine(RESERVATION_TRANSITIONS, ReservationState.RESERVED)


def job_state_machine() -> StateMachine[JobState]:
    """Return a machine for one new prefill job."""
    return StateMachine(JOB_TRANSITIONS, JobState.QUEUED)
