"""What a failed attempt means: whether another one may follow, where, and whose fault it was.

A retry never goes where it could meet the fault again, unless the fault is known to have passed.
Only what a peer alone can cause counts against it: a client must not be able to close a peer
for the others.
"""

from dataclasses import dataclass
from enum import Enum

from decode_service.prefill_errors import (
    PrefillComputeError,
    PrefillDrainingError,
    PrefillLeaseError,
    PrefillLinkError,
    PrefillSilentError,
    PrefillTimeoutError,
)
from serving_core.errors import (
    KvCorruptError,
    OverloadedError,
    PrefillUnavailableError,
    SessionUnknownError,
    TandemError,
)


class Retry(Enum):
    """Where a second attempt may go."""

    NEVER = "never"
    ELSEWHERE = "elsewhere"  # to another process
    ELSEWHERE_IF_FREE = "elsewhere_if_free"  # the same, but only if retries are plenty
    ANYWHERE = "anywhere"  # to another process if there is one, else to the same


class Blame(Enum):
    """Whether the attempt counts against the peer."""

    NOBODY = "nobody"
    PEER = "peer"
    PEER_IF_OTHERS_SUCCEED = "peer_if_others_succeed"  # else the request may be the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a failed attempt.

    Attributes:
        retry: Where a second attempt may go.
        blame: Whose fault it was.
        drops_session: Whether the handshake is not to be used for other requests either.
    """

    retry: Retry
    blame: Blame
    drops_session: bool = False


_FINAL = Verdict(retry=Retry.NEVER, blame=Blame.NOBODY)
# In the order of the checks: a class comes before its base.
_VERDICTS: tuple[tuple[type[TandemError], Verdict], ...] = (
    # Bytes are damaged by chance or by bad hardware; the same peer may do better.
    (KvCorruptError, Verdict(retry=Retry.ANYWHERE, blame=Blame.PEER)),
    (
        SessionUnknownError,
        Verdict(retry=Retry.ANYWHERE, blame=Blame.PEER, drops_session=True),
    ),
    (PrefillLinkError, Verdict(retry=Retry.ANYWHERE, blame=Blame.PEER, drops_session=True)),
    # The request's own time ran out, or our pool stayed full.
    (PrefillTimeoutError, _FINAL),
    (
        PrefillDrainingError,
        Verdict(retry=Retry.ELSEWHERE, blame=Blame.NOBODY, drops_session=True),
    ),
    # Others must not wait for a stopped process, each for as long as this one.
    (
        PrefillSilentError,
        Verdict(retry=Retry.ELSEWHERE, blame=Blame.PEER, drops_session=True),
    ),
    # It was we who did not renew.
    (PrefillLeaseError, Verdict(retry=Retry.ELSEWHERE, blame=Blame.NOBODY)),
    (
        PrefillComputeError,
        Verdict(retry=Retry.ELSEWHERE, blame=Blame.PEER_IF_OTHERS_SUCCEED),
    ),
)
_NOT_TAKEN = Verdict(retry=Retry.ANYWHERE, blame=Blame.PEER, drops_session=True)
_LOST = Verdict(retry=Retry.ELSEWHERE, blame=Blame.PEER)
_FULL = Verdict(retry=Retry.ELSEWHERE_IF_FREE, blame=Blame.NOBODY)


def judge(error: TandemError, *, was_admitted: bool) -> Verdict:
    """Return what follows from an attempt's error.

    Args:
        error: With which the attempt ended.
        was_admitted: Whether prefill had taken the request.
    """
    for kind, verdict in _VERDICTS:
        if isinstance(error, kind):
            return verdict
    if isinstance(error, PrefillUnavailableError):
        return _LOST if was_admitted else _NOT_TAKEN
    # After the admission it is our own pool or our own reading that is too slow.
    if isinstance(error, OverloadedError) and not was_admitted:
        return _FULL
    return _FINAL
