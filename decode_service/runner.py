"""The compute thread: owns the running batch and the model.

Commands come in by a bounded queue and are obeyed between two steps. Each sequence that joined
leaves with exactly one last result, and that result means that no local step writes the
sequence's blocks any more:

    join -> Sampled* -> Sampled with finish | Removed | StepFailed
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decode_service.scheduler import DecodeSequence, SequenceId, StepScheduler
from decode_service.stop_rule import FinishReason
from serving_core.compute_thread import ComputeThread
from serving_core.sampler import SampleRequest, sample

logger = logging.getLogger(__name__)


class Stepper(Protocol):
    """Runs one step of the model for a batch."""

    def step(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        """Return fp32 [N, V] logits of the token after each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One more token; with `finish` the sequence has left."""

    sequence_id: SequenceId
    token_id: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The sequence left on command."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step of the sequence raised, and it has left; `message` names the error."""

    sequence_id: SequenceId
    message: str


StepResult = Sampled | Removed | StepFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did, for metrics."""

    batch_size: int
    num_waiting: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The command that a sequence leave."""

    sequence_id: SequenceId


class Runner:
    """Runs decode steps on a thread of its own."""

    def __init__(
        self,
        *,
        stepper: Stepper,
        max_num_seqs: int,
        max_num_joined: int,
        on_results: Callable[[Sequence[StepResult]], None],
        on_step: Callable[[StepStats], None],
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the collaborators; nothing runs before `start`.

        Args:
            stepper: The model; only the compute thread uses it from now on.
            max_num_seqs: Most sequences of one step.
            max_num_joined: Most sequences that have joined and not left.
            on_results: Called on the compute thread after each step and each removal.
            on_step: Called on the compute thread after each step.
            on_fatal: Called on the compute thread when it ends on an error of its own.
            clock: Monotonic seconds.
        """
        self._stepper = stepper
        self._scheduler = StepScheduler(max_num_seqs=max_num_seqs)
        self._on_results = on_results
        self._on_step = on_step
        self._clock = clock
        self._thread: ComputeThread[DecodeSequence | Leave] = ComputeThread(
            name="decode-compute",
            worker=self,
            # Each sequence joins once and is told to leave at most once.
            max_commands=2 * max_num_joined,
            on_fatal=on_fatal,
        )

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    def join(self, sequence: DecodeSequence) -> None:
        """Hand a sequence over; it joins the batch before the next step. Never blocks."""
        self._thread.post(sequence)

    def leave(self, sequence_id: SequenceId) -> None:
        """Let a sequence leave before the next step. Never blocks; too late is harmless."""
        self._thread.post(Leave(sequence_id=sequence_id))

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its running step; blocks. Returns False if it did not end."""
        return self._thread.stop(timeout_s)

    def is_idle(self) -> bool:
        """Whether no sequence is here; see Worker."""
        return len(self._scheduler) == 0

    def obey(self, command: DecodeSequence | Leave) -> None:
        """Let a sequence join or leave; see Worker."""
        if isinstance(command, DecodeSequence):
            self._scheduler.join(command)
        elif self._scheduler.leave(command.sequence_id):
            self._on_results([Removed(sequence_id=command.sequence_id)])

    def step(self) -> None:
        """Run one step; see Worker."""
        if batch := self._scheduler.next_batch():
            self._step(batch)

    def _step(self, batch: Sequence[DecodeSequence]) -> None:
        """Run one step; an exception of the model ends the sequences of this step only."""
        started_s = self._clock()
        try:
            token_ids = self._sample(batch, self._stepper.step(batch))
        except Exception as error:  # any fault of a model step is this boundary's to report
            results = self._fail(batch, error)
        else:
            results = self._advance(batch, token_ids)
        self._on_results(results)
        self._on_step(
            StepStats(
                batch_size=len(batch),
                num_waiting=len(self._scheduler) - self._scheduler.num_running,
                duration_s=self._clock() - started_s,
            )
        )

    def _sample(self, batch: Sequence[DecodeSequence], logits: Tensor) -> list[int]:
        return sample(
            logits,
            [
                SampleRequest(
                    params=sequence.sampling,
                    seed=sequence.seed,
                    position=sequence.num_tokens,
                    banned_token_ids=sequence.stop_rule.banned_token_ids(
                        sequence.num_output_tokens
                    ),
                )
                for sequence in batch
            ],
        )

    def _advance(
        self, batch: Sequence[DecodeSequence], token_ids: Sequence[int]
    ) -> Sequence[StepResult]:
        results: list[StepResult] = []
        for sequence, token_id in zip(batch, token_ids, strict=True):
            finish = sequence.append(token_id)
            if finish is not None:
                self._scheduler.leave(sequence.sequence_id)
            results.append(
                Sampled(sequence_id=sequence.sequence_id, token_id=token_id, finish=finish)
            )
        return results

    def _fail(self, batch: Sequence[DecodeSequence], error: Exception) -> Sequence[StepResult]:
        logger.error("decode step failed batch_size=%d", len(batch), exc_info=error)
        for sequence in batch:
            self._scheduler.leave(sequence.sequence_id)
        return [
            StepFailed(sequence_id=sequence.sequence_id, message=type(error).__name__)
            for sequence in batch
        ]
