"""What a prefill service's refusals and failures mean for the request, as errors of ours."""

from collections.abc import Mapping

from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_status import rpc_status

from serving_core.errors import (
    ComputeError,
    LayoutMismatchError,
    OverloadedError,
    PrefillUnavailableError,
    SessionUnknownError,
    TandemError,
)
from serving_core.rpc.status import ERROR_DOMAIN
from tandem.v1 import errors_pb2

_DEFAULT_RETRY_AFTER_S = 0.5


class PrefillTimeoutError(PrefillUnavailableError):
    """Prefill waited too long for the grant, or for the end of the request."""


class PrefillLinkError(PrefillUnavailableError):
    """The way the KV takes broke; a new handshake makes a new one."""


class PrefillSilentError(PrefillUnavailableError):
    """Prefill keeps the connection but says nothing, not even a heartbeat: it is stopped."""


class PrefillDrainingError(PrefillUnavailableError):
    """Prefill shuts down in good order and takes nothing more."""


class PrefillLeaseError(PrefillUnavailableError):
    """Prefill stopped writing because our Renew did not arrive in time."""


class PrefillComputeError(ComputeError):
    """A step of prefill raised: the peer is broken, or the request breaks it."""


_OUR_MISTAKE = (
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.UNIMPLEMENTED,
)
_RETRYABLE: Mapping[StatusCode, type[OverloadedError] | type[PrefillUnavailableError]] = {
    StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    StatusCode.DEADLINE_EXCEEDED: PrefillTimeoutError,
}
_UNAVAILABLE: Mapping[errors_pb2.FailureReason, type[PrefillUnavailableError]] = {
    errors_pb2.FAILURE_REASON_DEADLINE_EXCEEDED: PrefillTimeoutError,
    errors_pb2.FAILURE_REASON_DRAINING: PrefillDrainingError,
    errors_pb2.FAILURE_REASON_LEASE_EXPIRED: PrefillLeaseError,
    errors_pb2.FAILURE_REASON_LINK_BROKEN: PrefillLinkError,
}


def error_from_rpc(error: AioRpcError) -> TandemError:
    """Translate the status with which a prefill service ended a call.

    A status that only our own mistake can cause becomes ComputeError, so that the client does not
    read it as its own.
    """
    info, retry_after_s = _details(error)
    code = error.code()
    text = f"prefill answered {code.name}: {error.details()}"
    if info.reason == "SESSION_UNKNOWN":
        return SessionUnknownError("ours")
    if info.reason == "LAYOUT_MISMATCH":
        told = info.metadata  # seen from prefill: its "ours" is the peer's value here
        return LayoutMismatchError(
            told.get("field", "layout"), told.get("theirs", "unknown"), told.get("ours", "unknown")
        )
    if info.reason == "DRAINING":
        return PrefillDrainingError(text, retry_after_s=retry_after_s)
    if code in _OUR_MISTAKE:
        return ComputeError(text)
    # Without details it is gRPC's own word for a connection that broke at a bad moment.
    if code is StatusCode.INTERNAL and info.reason:
        return PrefillComputeError(text)
    kind = _RETRYABLE.get(code, PrefillUnavailableError)
    return kind(text, retry_after_s=retry_after_s)


def error_from_failure(failure: errors_pb2.Failure) -> TandemError:
    """Translate a Failed message, keeping the layer and rank it names."""
    place = f" at layer {failure.layer}" if failure.HasField("layer") else ""
    place += f" rank {failure.rank}" if failure.HasField("rank") else ""
    reason = errors_pb2.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_")
    text = f"prefill failed{place}: {reason}: {failure.message}"
    if failure.reason == errors_pb2.FAILURE_REASON_SESSION_UNKNOWN:
        return SessionUnknownError("ours")
    if failure.reason == errors_pb2.FAILURE_REASON_OVERLOADED:
        return OverloadedError(text, retry_after_s=_DEFAULT_RETRY_AFTER_S)
    if failure.reason == errors_pb2.FAILURE_REASON_COMPUTE_FAILED:
        return PrefillComputeError(text)
    if failure.reason in (
        errors_pb2.FAILURE_REASON_INVALID_REQUEST,
        errors_pb2.FAILURE_REASON_TICKET_REJECTED,
    ):
        return ComputeError(text)
    kind = _UNAVAILABLE.get(failure.reason, PrefillUnavailableError)
    return kind(text, retry_after_s=_DEFAULT_RETRY_AFTER_S)


def _details(error: AioRpcError) -> tuple[error_details_pb2.ErrorInfo, float]:
    """Return our ErrorInfo (empty when there is none) and the retry delay in seconds."""
    info = error_details_pb2.ErrorInfo()
    retry_after_s = _DEFAULT_RETRY_AFTER_S
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it only reads the metadata
    for detail in status.details if status is not None else ():
        found = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(found) and found.domain == ERROR_DOMAIN:
            info = found
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return info, retry_after_s
