"""Gets the KV of a prompt: chooses a prefill service, hands the prompt over, retries once.

A retry runs on a fresh ticket and into fresh blocks, at most once per request and within a budget.
Whatever the first attempt was granted is the revoker's by then: its blocks come back, or stay in
quarantine, without the request. No token was sent yet, so the client sees nothing of it.
What may be tried again, and where, says `attempt_verdict`. Event loop thread only.
"""

import itertools
from dataclasses import dataclass

from decode_service.attempt_verdict import Blame, Retry, Verdict, judge
from decode_service.circuit_breaker import Trial
from decode_service.handoff import Handoff, HandoffRequest, HandoffTools, LandedKv
from decode_service.prefill_pool import ChosenPeer, PrefillPool
from decode_service.retry_budget import RetryBudget
from serving_core.errors import PrefillUnavailableError, SessionUnknownError, TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An attempt that failed; whoever holds it ends the trial."""

    error: TandemError
    verdict: Verdict
    chosen: ChosenPeer
    trial: Trial


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
            PrefillUnavailableError: No prefill service is usable, or those that were failed.
            OverloadedError: A queue of prefill or of ours is full.
            KvCorruptError: Bytes failed their check.
            ComputeError: A step of prefill raised.
        """
        self._budget.earn()
        chosen = await self._peers.choose(len(request.prompt_token_ids))
        first = await self._attempt(request, chosen)
        if isinstance(first, LandedKv):
            return first
        try:
            return await self._try_again(request, first)
        finally:
            first.trial.abandon()

    def release(self, landed: LandedKv) -> None:
        """Give the blocks back; neither a writer nor a local step touches them any more."""
        self._tools.blocks.give_back(self._tools.table.close(landed.ticket_id).block_ids)

    async def _try_again(self, request: HandoffRequest, first: _Failure) -> LandedKv:
        chosen = await self._second_choice(request, first)
        if chosen is None:
            raise _told_to_client(first.error) from first.error
        request.log.warning(
            "hand-off is tried again prefill=%s then=%s error=%s",
            first.chosen.peer.address,
            chosen.peer.address,
            first.error,
        )
        self._tools.metrics.handoff_retries.inc()
        second = await self._attempt(request, chosen)
        if isinstance(second, _Failure):
            second.trial.abandon()
            raise _told_to_client(second.error) from second.error
        if first.verdict.blame is Blame.PEER_IF_OTHERS_SUCCEED:
            first.trial.fail(f"another prefill service could do it: {first.error}")
        return second

    async def _second_choice(self, request: HandoffRequest, first: _Failure) -> ChosenPeer | None:
        """Return where to try again, with the retry paid for; None when there is no retry."""
        retry = first.verdict.retry
        if retry is Retry.NEVER:
            return None
        # A refusal is no fault: half of the purse is kept for faults.
        num_left = self._budget.burst // 2 if retry is Retry.ELSEWHERE_IF_FREE else 0
        if not self._budget.spend(num_left=num_left):
            self._tools.metrics.handoff_retries_denied.inc()
            return None
        chosen = None
        try:
            chosen = await self._peers.choose_again(
                len(request.prompt_token_ids), failed=first.chosen, retry=retry
            )
        finally:
            if chosen is None:
                self._budget.give_back()
        return chosen

    async def _attempt(self, request: HandoffRequest, chosen: ChosenPeer) -> LandedKv | _Failure:
        """Make one attempt. The trial of a failure is left to the caller to end."""
        handoff_id = f"{self._tools.issuer.decode_incarnation}-{next(self._next_attempt)}"
        handoff = Handoff(request, chosen, self._tools, handoff_id=handoff_id)
        with self._peers.attempt(chosen, len(request.prompt_token_ids)) as trial:
            try:
                landed = await handoff.run()
            except TandemError as error:
                verdict = judge(error, was_admitted=handoff.was_admitted)
                if verdict.blame is Blame.PEER:
                    trial.fail(f"{type(error).__name__}: {error}")
                if verdict.drops_session:
                    chosen.peer.invalidate(chosen.session, str(error))
                return _Failure(error=error, verdict=verdict, chosen=chosen, trial=trial)
            except BaseException:
                trial.abandon()
                raise
        trial.succeed()
        return landed


def _told_to_client(error: TandemError) -> TandemError:
    """A client must not be told to fix a handshake that is none of its business."""
    if isinstance(error, SessionUnknownError):
        return PrefillUnavailableError(f"prefill lost our handshake: {error}")
    return error
