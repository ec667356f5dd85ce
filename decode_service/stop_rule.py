"""When a sequence ends by its token ids and its length; pure ints.

Stop strings are not here: they need text, and the compute thread has none.
"""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended; the value is what the client reads."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The ends that a sequence may come to.

    Attributes:
        stop_token_ids: Ids that end the sequence, end-of-text ids included unless ignored.
        min_tokens: Output tokens before which no stop id may be sampled.
        max_tokens: Output tokens after which the sequence ends; at least 1.
    """

    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    def banned_token_ids(self, num_output_tokens: int) -> tuple[int, ...]:
        """Return the ids that must not be sampled after `num_output_tokens` output tokens."""
        if num_output_tokens >= self.min_tokens:
            return ()
        return tuple(sorted(self.stop_token_ids))

    def check(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Tell whether the sequence ends with `token_id` as its `num_output_tokens`-th output."""
        if token_id in self.stop_token_ids and num_output_tokens > self.min_tokens:
            return FinishReason.STOP
        if num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None
