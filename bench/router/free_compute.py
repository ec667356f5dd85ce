"""What takes the place of the model and of prefill: tokens and KV that cost nothing.

Everything else of the decode service is the real thing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_service.handoff import HandoffRequest, LandedKv
from decode_service.runner import Removed, Sampled, StepResult
from decode_service.scheduler import DecodeSequence, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How tokens come.

    Attributes:
        tokens_per_step: Tokens of each sequence that come at once.
        step_s: Time between two steps.
    """

    tokens_per_step: int
    step_s: float


class FreeKv:
    """KV of any prompt, at once."""

    def __init__(self, first_token_id: int) -> None:
        """Let each output begin with a token."""
        self._first_token_id = first_token_id

    async def receive(self, request: HandoffRequest) -> LandedKv:  # noqa: ARG002  the protocol's
        """Return KV that is nowhere."""
        return LandedKv(
            ticket_id=bytes(16),
            block_ids=(),
            first_token_id=self._first_token_id,
            num_cached_tokens=0,
            pushed_bytes=0,
            queue_time_s=0.0,
            compute_time_s=0.0,
            exposed_transfer_s=0.0,
        )

    def release(self, landed: LandedKv) -> None:
        """Give nothing back."""


class FreeCompute:
    """A compute thread that gives every sequence the same token at a steady pace."""

    def __init__(self, token_id: int, on_results: Callable[[Sequence[StepResult]], None]) -> None:
        """Start the thread; `on_results` is called on it."""
        self._token_id = token_id
        self._on_results = on_results
        self._changed = threading.Condition()
        self._pace = Pace(tokens_per_step=1, step_s=1e-3)
        self._joined: dict[SequenceId, DecodeSequence] = {}
        self._left: list[SequenceId] = []
        self._thread = threading.Thread(target=self._run, name="free-compute", daemon=True)
        self._thread.start()

    def set_pace(self, pace: Pace) -> None:
        """Change the pace, from the next step on."""
        with self._changed:
            self._pace = pace

    def cpu_s(self) -> float:
        """Return the CPU time of the thread."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def join(self, sequence: DecodeSequence) -> None:
        """As the protocol says."""
        with self._changed:
            self._joined[sequence.sequence_id] = sequence
            self._changed.notify()

    def leave(self, sequence_id: SequenceId) -> None:
        """As the protocol says."""
        with self._changed:
            self._left.append(sequence_id)
            self._changed.notify()

    def _run(self) -> None:
        next_step_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._joined or self._left)
                pace = self._pace
            next_step_s = max(next_step_s + pace.step_s, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))
            with self._changed:
                results = self._step(pace)
            self._on_results(results)

    def _step(self, pace: Pace) -> list[StepResult]:
        # One that has just ended by itself has had its last result.
        results: list[StepResult] = [
            Removed(sequence_id=sequence_id)
            for sequence_id in self._left
            if self._joined.pop(sequence_id, None) is not None
        ]
        self._left.clear()
        for sequence_id, sequence in list(self._joined.items()):
            for _ in range(pace.tokens_per_step):
                finish = sequence.append(self._token_id)
                results.append(
                    Sampled(sequence_id=sequence_id, token_id=self._token_id, finish=finish)
                )
                if finish is not None:
                    del self._joined[sequence_id]
                    break
        return results
