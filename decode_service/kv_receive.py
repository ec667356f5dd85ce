"""Gets the KV of a prompt: chooses a prefill service, hands the prompt over, retries once.

A retry runs on a fresh ticket and into fresh blocks. It happens at most once per request, and only
when the first attempt left nothing that could still be written: prefill had not taken the request,
did not know the handshake, or delivered bytes that failed their check. Event loop thread only.
"""

import itertools
from dataclasses import dataclass, field

from decode_service.handoff import Handoff, HandoffRequest, HandoffTools, LandedKv
from decode_service.prefill_errors import PrefillSilentError
from decode_service.prefill_pool import PrefillPool
from serving_core.errors import (
    KvCorruptError,
    PrefillUnavailableError,
    SessionUnknownError,
    TandemError,
)


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """Retries as a share of the traffic, so that retries cannot feed an overload.

    Attributes:
        requests_per_retry: Requests that earn one retry.
        burst: Most retries that can be saved up; also what there is at the start.
    """

    requests_per_retry: int = 10
    burst: int = 10
    _saved_requests: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with a full purse."""
        self._saved_requests = self.burst * self.requests_per_retry

    def earn(self) -> None:
        """Count a request."""
        self._saved_requests = min(self.burst * self.requests_per_retry, self._saved_requests + 1)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._saved_requests < self.requests_per_retry:
            return False
        self._saved_requests -= self.requests_per_retry
        return True


class KvReceiver:
    """Turns requests into landed KV."""

    def __init__(self, *, tools: HandoffTools, peers: PrefillPool, budget: RetryBudget) -> None:
        """Take the collaborators."""
        self._tools = tools
        self._peers = peers
        self._budget = budget
        self._next_attempt = itertools.count(1)

    async def receive(self, request: HandoffRequest) -> LandedKv:
        """Return verified KV; the caller owns it until `release`. The caller bounds the wait.

        Raises:
            PrefillUnavailableError: No prefill service is usable, or the chosen one failed.
            OverloadedError: A queue of prefill or of ours is full.
            KvCorruptError: Bytes failed their check, twice.
            ComputeError: A step of prefill raised.
        """
        self._budget.earn()
        try:
            return await self._attempt(request)
        except _RepeatableError as repeatable:
            if not self._budget.spend():
                raise _told_to_client(repeatable.error) from repeatable
            request.log.warning("hand-off is tried again error=%s", repeatable.error)
            self._tools.metrics.handoff_retries.inc()
        try:
            return await self._attempt(request)
        except _RepeatableError as repeatable:
            raise _told_to_client(repeatable.error) from repeatable

    def release(self, landed: LandedKv) -> None:
        """Give the blocks back; neither a writer nor a local step touches them any more."""
        self._tools.blocks.give_back(self._tools.table.close(landed.ticket_id).block_ids)

    async def _attempt(self, request: HandoffRequest) -> LandedKv:
        num_tokens = len(request.prompt_token_ids)
        chosen = await self._peers.choose(num_tokens)
        handoff_id = f"{self._tools.issuer.decode_incarnation}-{next(self._next_attempt)}"
        handoff = Handoff(request, chosen, self._tools, handoff_id=handoff_id)
        try:
            with self._peers.pending(chosen.peer, num_tokens):
                return await handoff.run()
        except KvCorruptError as error:
            raise _RepeatableError(error) from error
        except SessionUnknownError as error:
            chosen.peer.invalidate(chosen.session, str(error))
            raise _RepeatableError(error) from error
        except PrefillUnavailableError as error:
            if handoff.was_admitted:
                if isinstance(error, PrefillSilentError):
                    # Others must not wait for a stopped process, each for as long as this one.
                    chosen.peer.invalidate(chosen.session, str(error))
                raise
            chosen.peer.invalidate(chosen.session, str(error))
            raise _RepeatableError(error) from error


class _RepeatableError(Exception):
    """An attempt failed in a way that allows another one."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(str(error))
        self.error = error


def _told_to_client(error: TandemError) -> TandemError:
    """A client must not be told to fix a handshake that is none of its business."""
    if isinstance(error, SessionUnknownError):
        return PrefillUnavailableError(f"prefill lost our handshake twice: {error}")
    return error
