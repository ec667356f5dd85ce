"""Which failures are tried again, where, and which of them count against the peer."""

from __future__ import annotations

import grpc
import pytest

from decode_service.attempt_verdict import Blame, Retry, judge
from decode_service.prefill_errors import (
    PrefillComputeError,
    PrefillDrainingError,
    PrefillLeaseError,
    PrefillSilentError,
    PrefillTimeoutError,
    error_from_failure,
    error_from_rpc,
)
from serving_core import errors
from serving_core.rpc.status import to_rpc_status
from tandem.v1 import errors_pb2

E = errors
CASES = [
    # error, admitted, retry, blame, drops the session
    (E.PrefillUnavailableError("x"), False, Retry.ANYWHERE, Blame.PEER, True),
    (E.PrefillUnavailableError("x"), True, Retry.ELSEWHERE, Blame.PEER, False),
    (PrefillSilentError("x"), False, Retry.ELSEWHERE, Blame.PEER, True),
    (PrefillSilentError("x"), True, Retry.ELSEWHERE, Blame.PEER, True),
    (PrefillDrainingError("x"), False, Retry.ELSEWHERE, Blame.NOBODY, True),
    (PrefillDrainingError("x"), True, Retry.ELSEWHERE, Blame.NOBODY, True),
    (PrefillLeaseError("x"), True, Retry.ELSEWHERE, Blame.NOBODY, False),
    (PrefillTimeoutError("x"), False, Retry.NEVER, Blame.NOBODY, False),
    (PrefillTimeoutError("x"), True, Retry.NEVER, Blame.NOBODY, False),
    (E.SessionUnknownError("x"), False, Retry.ANYWHERE, Blame.PEER, True),
    (E.KvCorruptError("x"), True, Retry.ANYWHERE, Blame.PEER, False),
    (PrefillComputeError("x"), True, Retry.ELSEWHERE, Blame.PEER_IF_OTHERS_SUCCEED, False),
    (E.ComputeError("x"), False, Retry.NEVER, Blame.NOBODY, False),
    (E.OverloadedError("x"), False, Retry.ELSEWHERE_IF_FREE, Blame.NOBODY, False),
    (E.OverloadedError("x"), True, Retry.NEVER, Blame.NOBODY, False),
    (E.PoolExhaustedError(2, 1), True, Retry.NEVER, Blame.NOBODY, False),
    (E.InvalidRequestError("f", 1, 2), False, Retry.NEVER, Blame.NOBODY, False),
    (E.DeadlineError("x"), True, Retry.NEVER, Blame.NOBODY, False),
    (E.RequestCancelledError("x"), True, Retry.NEVER, Blame.NOBODY, False),
]


@pytest.mark.parametrize(("error", "was_admitted", "retry", "blame", "drops"), CASES)
def test_verdict_follows_from_error_and_admission(
    error: errors.TandemError, was_admitted: bool, retry: Retry, blame: Blame, drops: bool
) -> None:
    verdict = judge(error, was_admitted=was_admitted)
    assert (verdict.retry, verdict.blame, verdict.drops_session) == (retry, blame, drops)


FAILURES = {
    errors_pb2.FAILURE_REASON_INVALID_REQUEST: Retry.NEVER,
    errors_pb2.FAILURE_REASON_OVERLOADED: Retry.NEVER,
    errors_pb2.FAILURE_REASON_SESSION_UNKNOWN: Retry.ANYWHERE,
    errors_pb2.FAILURE_REASON_TICKET_REJECTED: Retry.NEVER,
    errors_pb2.FAILURE_REASON_LEASE_EXPIRED: Retry.ELSEWHERE,
    errors_pb2.FAILURE_REASON_WRITE_FAILED: Retry.ELSEWHERE,
    errors_pb2.FAILURE_REASON_COMPUTE_FAILED: Retry.ELSEWHERE,
    errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED: Retry.NEVER,
    errors_pb2.FAILURE_REASON_DRAINING: Retry.ELSEWHERE,
    errors_pb2.FAILURE_REASON_LAYOUT_MISMATCH: Retry.ELSEWHERE,
    errors_pb2.FAILURE_REASON_LINK_BROKEN: Retry.ANYWHERE,
}


def test_every_reason_of_a_failed_message_has_its_verdict() -> None:
    """A reason that is new must be thought about here."""
    reasons = set(errors_pb2.FailureReason.values()) - {errors_pb2.FAILURE_REASON_UNSPECIFIED}
    found = {
        reason: judge(
            error_from_failure(errors_pb2.Failure(reason=reason, message="planned")),
            was_admitted=True,
        ).retry
        for reason in reasons
    }
    assert found == FAILURES


@pytest.mark.parametrize(
    ("told", "retry"),
    [
        (E.DrainingError("planned"), Retry.ELSEWHERE),
        (E.SessionUnknownError("planned"), Retry.ANYWHERE),
        (E.OverloadedError("planned"), Retry.ELSEWHERE_IF_FREE),
        (E.PrefillUnavailableError("planned"), Retry.ANYWHERE),
        (E.DeadlineError("planned"), Retry.NEVER),
        (E.InvalidRequestError("field", 1, 2), Retry.NEVER),
        (E.ComputeError("planned"), Retry.ELSEWHERE),
        (E.TandemError("something unforeseen"), Retry.ELSEWHERE),
    ],
)
def test_status_before_the_admission_has_its_verdict(
    told: errors.TandemError, retry: Retry
) -> None:
    """The error goes through the same table of statuses that prefill uses."""
    status = to_rpc_status(told)
    error = grpc.aio.AioRpcError(
        status.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*status.trailing_metadata),
        details=status.details,
    )
    assert judge(error_from_rpc(error), was_admitted=False).retry is retry


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_only_what_a_peer_alone_can_cause_counts_against_it(code: grpc.StatusCode) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
    blame = judge(error_from_rpc(error), was_admitted=True).blame
    innocent = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert blame is (Blame.NOBODY if code in innocent else Blame.PEER)
