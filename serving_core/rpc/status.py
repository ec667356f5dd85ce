"""One table from errors to gRPC statuses.

UNAVAILABLE stands only where the same request can succeed elsewhere or later; routers retry it.
Details travel as `google.rpc.Status`: ErrorInfo always, RetryInfo where a delay is known, and
BadRequest where a field is at fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving_core import errors

ERROR_DOMAIN = "tandem"
MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRule:
    """How one class of errors is told to a caller."""

    code: grpc.StatusCode
    reason: str


_RULES: dict[type[errors.TandemError], StatusRule] = {
    errors.TandemError: StatusRule(code=grpc.StatusCode.INTERNAL, reason="INTERNAL"),
    errors.InvalidRequestError: StatusRule(
        code=grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_REQUEST"
    ),
    errors.PromptTooLongError: StatusRule(
        code=grpc.StatusCode.INVALID_ARGUMENT, reason="PROMPT_TOO_LONG"
    ),
    errors.UnsupportedError: StatusRule(
        code=grpc.StatusCode.INVALID_ARGUMENT, reason="UNSUPPORTED"
    ),
    errors.ModelNotFoundError: StatusRule(code=grpc.StatusCode.NOT_FOUND, reason="MODEL_NOT_FOUND"),
    errors.SessionUnknownError: StatusRule(
        code=grpc.StatusCode.FAILED_PRECONDITION, reason="SESSION_UNKNOWN"
    ),
    errors.LayoutMismatchError: StatusRule(
        code=grpc.StatusCode.FAILED_PRECONDITION, reason="LAYOUT_MISMATCH"
    ),
    errors.OverloadedError: StatusRule(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="OVERLOADED"
    ),
    errors.PoolExhaustedError: StatusRule(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="POOL_EXHAUSTED"
    ),
    errors.PrefillUnavailableError: StatusRule(
        code=grpc.StatusCode.UNAVAILABLE, reason="PREFILL_UNAVAILABLE"
    ),
    # A fresh attempt recomputes the prompt, so a retry can help; the bad bytes were never served.
    errors.KvCorruptError: StatusRule(code=grpc.StatusCode.UNAVAILABLE, reason="KV_CORRUPT"),
    errors.DrainingError: StatusRule(code=grpc.StatusCode.UNAVAILABLE, reason="DRAINING"),
    errors.DeadlineError: StatusRule(
        code=grpc.StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"
    ),
    errors.RequestCancelledError: StatusRule(code=grpc.StatusCode.CANCELLED, reason="CANCELLED"),
    errors.ComputeError: StatusRule(code=grpc.StatusCode.INTERNAL, reason="COMPUTE_FAILED"),
    errors.StartupError: StatusRule(code=grpc.StatusCode.INTERNAL, reason="STARTUP"),
    errors.ConfigError: StatusRule(code=grpc.StatusCode.INTERNAL, reason="CONFIG"),
    errors.CheckpointError: StatusRule(code=grpc.StatusCode.INTERNAL, reason="CHECKPOINT"),
}


def status_rule(error: errors.TandemError) -> StatusRule:
    """Return the rule of the error's class, or of its nearest base."""
    for base in type(error).__mro__:
        if base in _RULES:
            return _RULES[base]
    raise AssertionError("TandemError itself has a rule")


def to_rpc_status(error: errors.TandemError) -> Any:
    """Return what `context.abort_with_status` takes: code, message and details of the error."""
    rule = status_rule(error)
    message = str(error)[:MAX_MESSAGE_CHARS]
    details = [_error_info(error, rule)]
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, errors.InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(rule.code.name), message=message, details=details
    )
    return rpc_status.to_status(status)


def _error_info(error: errors.TandemError, rule: StatusRule) -> any_pb2.Any:
    names = ("field", "value", "limit", "ours", "theirs", "model", "served")
    metadata = {
        name: str(getattr(error, name)) for name in names if getattr(error, name, None) is not None
    }
    info = error_details_pb2.ErrorInfo(reason=rule.reason, domain=ERROR_DOMAIN, metadata=metadata)
    return _pack(info)


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def reason_of(error: grpc.Call) -> str:
    """Return the ErrorInfo reason that a Tandem service attached; empty when there is none."""
    status = rpc_status.from_call(error)
    if status is None:
        return ""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return str(info.reason)
    return ""
