"""Chooses which prompt tokens the next model step computes: first come first served, in chunks.

The scheduler holds integers only, so it is tested without a model. It is owned by the compute
thread. One step never holds more than the token budget; what is left of the budget when a prompt
ends goes to the next prompt, so that one step mixes chunks of several prompts.
"""

from dataclasses import dataclass
from typing import NewType

JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One prompt's share of a step.

    Attributes:
        job_id: The job whose prompt it is.
        index: Counts the chunks of this prompt, from zero.
        start: First token row of the chunk.
        num_tokens: Number of rows, at least one.
        is_last: Whether the prompt is complete after this chunk.
    """

    job_id: JobId
    index: int
    start: int
    num_tokens: int
    is_last: bool

    @property
    def end(self) -> int:
        """One past the last token row of the chunk."""
        return self.start + self.num_tokens


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """How far one prompt is; changed by the scheduler only."""

    num_tokens: int
    num_scheduled: int = 0
    num_chunks: int = 0


class ChunkScheduler:
    """Cuts prompts into chunks under a token budget, in order of arrival."""

    def __init__(self, *, max_num_batched_tokens: int) -> None:
        """Make an empty scheduler.

        Args:
            max_num_batched_tokens: Most tokens of one step, at least one.

        Raises:
            ValueError: The budget is below one token.
        """
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens is {max_num_batched_tokens}, must be >= 1")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prompts: dict[JobId, _Prompt] = {}

    def __len__(self) -> int:
        """Return the number of prompts that still have tokens to schedule."""
        return len(self._prompts)

    def __contains__(self, job_id: JobId) -> bool:
        """Tell whether the job still has tokens to schedule."""
        return job_id in self._prompts

    def add(self, job_id: JobId, num_tokens: int) -> None:
        """Queue a prompt behind those that are there.

        Raises:
            ValueError: The prompt is empty, or the job is queued already.
        """
        if num_tokens < 1:
            raise ValueError(f"job {job_id} has {num_tokens} tokens, must be >= 1")
        if job_id in self._prompts:
            raise ValueError(f"job {job_id} is queued already")
        self._prompts[job_id] = _Prompt(num_tokens=num_tokens)

    def remove(self, job_id: JobId) -> bool:
        """Forget a prompt. Returns False when it was not there; calling twice is harmless."""
        return self._prompts.pop(job_id, None) is not None

    def schedule(self) -> tuple[Chunk, ...]:
        """Take the chunks of the next step off the queue; empty when nothing is queued.

        Every token of a prompt appears in exactly one chunk over all calls, in order. A prompt
        leaves the queue with its last chunk.
        """
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        for job_id, prompt in self._prompts.items():
            if budget == 0:
                break
            num_tokens = min(budget, prompt.num_tokens - prompt.num_scheduled)
            start = prompt.num_scheduled
            prompt.num_scheduled += num_tokens
            chunks.append(
                Chunk(
                    job_id=job_id,
                    index=prompt.num_chunks,
                    start=start,
                    num_tokens=num_tokens,
                    is_last=prompt.num_scheduled == prompt.num_tokens,
                )
            )
            prompt.num_chunks += 1
            budget -= num_tokens
        for chunk in chunks:
            if chunk.is_last:
                del self._prompts[chunk.job_id]
        return tuple(chunks)
