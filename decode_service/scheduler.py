"""Who is in the next decode step: continuous batching over pure ints, compute thread only.

Sequences join and leave between two steps, first come first served. A sequence holds all blocks
it will ever need before it joins, so none is ever preempted.

    join -> waiting -> running -> (advance: finished | leave | fail) -> gone
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NewType

from decode_service.stop_rule import FinishReason, StopRule
from serving_core.request import SamplingParams

SequenceId = NewType("SequenceId", int)


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeSequence:
    """One sequence whose KV has landed; changed by the compute thread only once it has joined.

    Attributes:
        sequence_id: Unique in this process; never the client's id.
        num_prompt_tokens: Rows of KV that prefill has written.
        block_ids: Blocks for prompt and output, in logical order.
        sampling: How tokens are chosen.
        seed: Of the counter-based generator; prefill used the same.
        stop_rule: When it ends.
        last_token_id: The newest token; its KV is computed by the next step.
        num_output_tokens: Tokens sampled so far, the first of which by prefill.
    """

    sequence_id: SequenceId
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_rule: StopRule
    last_token_id: int
    num_output_tokens: int = 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens; also the position of the token sampled next."""
        return self.num_prompt_tokens + self.num_output_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Take the newest token and tell whether the sequence ends with it."""
        self.last_token_id = token_id
        self.num_output_tokens += 1
        return self.stop_rule.check(token_id, self.num_output_tokens)


class StepScheduler:
    """The running batch and those that wait for a place in it."""

    def __init__(self, *, max_num_seqs: int) -> None:
        """Start empty.

        Args:
            max_num_seqs: Most sequences of one step.
        """
        self._max_num_seqs = max_num_seqs
        # Insertion order is arrival order, and a sequence runs until it is gone: the first
        # max_num_seqs entries are the running ones.
        self._sequences: OrderedDict[SequenceId, DecodeSequence] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of running and waiting sequences."""
        return len(self._sequences)

    @property
    def num_running(self) -> int:
        """Number of sequences in the next step."""
        return min(len(self._sequences), self._max_num_seqs)

    def join(self, sequence: DecodeSequence) -> None:
        """Put a sequence at the end of the line."""
        assert sequence.sequence_id not in self._sequences
        self._sequences[sequence.sequence_id] = sequence

    def leave(self, sequence_id: SequenceId) -> bool:
        """Take a sequence out; returns whether it was still there."""
        return self._sequences.pop(sequence_id, None) is not None

    def next_batch(self) -> Sequence[DecodeSequence]:
        """Return the sequences of the next step, in a stable order."""
        return tuple(islice(self._sequences.values(), self._max_num_seqs))
