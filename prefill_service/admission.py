"""Who waits and who may start: first come first served over the block pool and the running slots.

A job takes blocks for its whole prompt before its first chunk, so that no running job can be
stuck for want of blocks. Owned by the event loop thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_service.scheduler import JobId
from serving_core.block_pool import BlockPool
from serving_core.errors import OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job in the queue; `on_reserved` gets its blocks when it may start."""

    job_id: JobId
    num_tokens: int
    on_reserved: Callable[[tuple[int, ...]], None]


class Admission:
    """The queue before the compute thread, and the blocks of those that left it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_queued: int,
        retry_after_s: float,
    ) -> None:
        """Start with an empty queue.

        Args:
            pool: The blocks; nobody else takes any.
            block_size: Token rows of a block.
            max_num_seqs: Most jobs that hold blocks at one time.
            max_num_queued: Most jobs that wait for blocks.
            retry_after_s: What a refused caller is told to wait.
        """
        self._pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_queued = max_num_queued
        self._retry_after_s = retry_after_s
        self._queue: deque[Waiting] = deque()
        self._held: dict[JobId, tuple[int, ...]] = {}

    @property
    def num_queued(self) -> int:
        """Number of jobs that wait for blocks."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Number of jobs that hold blocks."""
        return len(self._held)

    @property
    def num_pending_tokens(self) -> int:
        """Number of prompt tokens that wait in the queue."""
        return sum(waiting.num_tokens for waiting in self._queue)

    def enqueue(self, waiting: Waiting) -> None:
        """Put a job at the end of the queue; `start_ready` lets it go on.

        Raises:
            OverloadedError: The queue is full.
        """
        if len(self._queue) >= self._max_num_queued:
            raise OverloadedError(
                f"{len(self._queue)} prompts are queued, the limit is {self._max_num_queued}",
                retry_after_s=self._retry_after_s,
            )
        self._queue.append(waiting)

    def withdraw(self, job_id: JobId) -> None:
        """Take a job out of the queue; harmless when it is not there.

        Those behind it may start at once: they need not wait for more blocks than they want.
        """
        self._queue = deque(waiting for waiting in self._queue if waiting.job_id != job_id)
        self.start_ready()

    def release(self, job_id: JobId) -> None:
        """Give a job's blocks back and let the next ones start.

        The caller has proof that neither the compute thread nor a push reads the blocks.
        """
        self._pool.free(self._held.pop(job_id))
        self.start_ready()

    def start_ready(self) -> None:
        """Reserve blocks for the head of the queue as long as they suffice."""
        while self._queue and len(self._held) < self._max_num_seqs:
            num_blocks = -(-self._queue[0].num_tokens // self._block_size)
            if num_blocks > self._pool.num_free:
                return
            waiting = self._queue.popleft()
            block_ids = self._pool.allocate(num_blocks)
            self._held[waiting.job_id] = block_ids
            waiting.on_reserved(block_ids)

    def queued_job_ids(self) -> Sequence[JobId]:
        """Return the jobs in the queue, in order."""
        return tuple(waiting.job_id for waiting in self._queue)
