"""Keeps requests away from a prefill service that fails them one after the other.

    CLOSED --FAILED_TOO_OFTEN--> OPEN --PROBE_BEGAN--> HALF_OPEN --PROBE_SUCCEEDED--> CLOSED
                                  ^                        |
                                  +--PROBE_FAILED, --------+
                                     PROBE_UNDECIDED

    PROCESS_REPLACED leads to CLOSED from anywhere: nothing is known of the new process yet.

Failures in a row are counted, not their share in a window: one decode service sends a peer few
requests, each for seconds, so that a share would mean nothing for most of the time. A broken
connection fails everything on it at once; that is one failure, because an attempt counts only if
it began after the last one that counted. Event loop thread only.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether requests may go to the peer."""

    CLOSED = "closed"  # they may
    OPEN = "open"  # they may not; one may as soon as the pause is over
    HALF_OPEN = "half_open"  # one is on its way to find out


class BreakerEvent(Enum):
    """What can change the state."""

    FAILED_TOO_OFTEN = "failed_too_often"
    PROBE_BEGAN = "probe_began"
    PROBE_SUCCEEDED = "probe_succeeded"
    PROBE_FAILED = "probe_failed"
    PROBE_UNDECIDED = "probe_undecided"
    PROCESS_REPLACED = "process_replaced"


# What is not here changes nothing, such as the end of a probe that another one has overtaken.
TRANSITIONS: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.FAILED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PROBE_BEGAN): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_SUCCEEDED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_UNDECIDED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PROCESS_REPLACED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.PROCESS_REPLACED): BreakerState.CLOSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When it opens, and for how long.

    Attributes:
        max_failures: Failures in a row that open it. Three: one may be a restart, two chance.
        pause_s: Time without requests before one may try, and the time after which another one
            may try when the first has not come back. About what a restart takes.
    """

    max_failures: int = 3
    pause_s: float = 5.0


class CircuitBreaker:
    """The breaker of one peer."""

    def __init__(
        self,
        settings: BreakerSettings,
        *,
        clock: Callable[[], float],
        on_transition: Callable[[BreakerState, str], None],
    ) -> None:
        """Start closed.

        Args:
            settings: Its limits.
            clock: Monotonic seconds.
            on_transition: Told each new state and what led to it.
        """
        self._settings = settings
        self._clock = clock
        self._on_transition = on_transition
        self._state = BreakerState.CLOSED
        self._next_number = itertools.count(1)
        self._newest = 0
        self._counted_up_to = 0
        self._void_up_to = 0
        self._num_failures = 0
        self._probe_due_s = 0.0

    @property
    def state(self) -> BreakerState:
        """Where it is now."""
        return self._state

    @property
    def wait_s(self) -> float:
        """Seconds until a request may go to the peer; 0 means now."""
        if self._state is BreakerState.CLOSED:
            return 0.0
        return max(0.0, self._probe_due_s - self._clock())

    @property
    def lets_through(self) -> bool:
        """Whether a request may go to the peer now."""
        return self.wait_s == 0.0

    def begin(self) -> "Trial":
        """Count a request that goes to the peer now; `lets_through` was true."""
        self._newest = next(self._next_number)
        is_probe = self._state is not BreakerState.CLOSED
        if is_probe:
            self._probe_due_s = self._clock() + self._settings.pause_s
            self._apply(BreakerEvent.PROBE_BEGAN, "a request tries it")
        return Trial(self, number=self._newest, is_probe=is_probe)

    def process_replaced(self) -> None:
        """Forget the past: another process has shaken hands at the peer's address."""
        self._num_failures = 0
        self._void_up_to = self._newest
        self._apply(BreakerEvent.PROCESS_REPLACED, "another process answers")

    def _succeeded(self, trial: "Trial") -> None:
        if trial.number <= self._void_up_to:
            return
        if self._state is BreakerState.CLOSED:
            self._num_failures = 0
        elif trial.is_probe:
            self._num_failures = 0
            self._apply(BreakerEvent.PROBE_SUCCEEDED, "a request succeeded")

    def _failed(self, trial: "Trial", cause: str) -> None:
        if trial.number <= max(self._void_up_to, self._counted_up_to):
            return
        if self._state is BreakerState.CLOSED:
            self._counted_up_to = self._newest
            self._num_failures += 1
            if self._num_failures >= self._settings.max_failures:
                self._probe_due_s = self._clock() + self._settings.pause_s
                self._apply(BreakerEvent.FAILED_TOO_OFTEN, cause)
        elif trial.is_probe:
            self._counted_up_to = self._newest
            self._probe_due_s = self._clock() + self._settings.pause_s
            self._apply(BreakerEvent.PROBE_FAILED, cause)

    def _undecided(self, trial: "Trial") -> None:
        if trial.is_probe and trial.number > self._void_up_to:
            if self._state is BreakerState.HALF_OPEN:
                self._probe_due_s = self._clock()
            self._apply(BreakerEvent.PROBE_UNDECIDED, "the request says nothing about the peer")

    def _apply(self, event: BreakerEvent, cause: str) -> None:
        state = TRANSITIONS.get((self._state, event), self._state)
        if state is not self._state:
            self._state = state
            self._on_transition(state, cause)


class Trial:
    """One request at one peer. Only its first outcome counts; it must get one."""

    def __init__(self, breaker: CircuitBreaker, *, number: int, is_probe: bool) -> None:
        """Use `CircuitBreaker.begin`.

        Args:
            breaker: Of the peer.
            number: Counts the breaker's trials.
            is_probe: Whether the breaker was not closed when it began.
        """
        self.number = number
        self.is_probe = is_probe
        self._breaker = breaker
        self._has_ended = False

    def succeed(self) -> None:
        """The peer did what it was asked."""
        if self._end():
            self._breaker._succeeded(self)

    def fail(self, cause: str) -> None:
        """The peer is at fault."""
        if self._end():
            self._breaker._failed(self, cause)

    def abandon(self) -> None:
        """Nothing was learned about the peer: the client left, or the request was at fault."""
        if self._end():
            self._breaker._undecided(self)

    def _end(self) -> bool:
        is_first = not self._has_ended
        self._has_ended = True
        return is_first
