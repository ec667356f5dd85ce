"""Errors of the client: one class per kind of gRPC status, each with what the service said.

ClientError
├── InvalidInputError    INVALID_ARGUMENT, or refused before it was sent; names field and limit
├── NotFoundError        NOT_FOUND: e.g. another model is served
├── OverloadedError      RESOURCE_EXHAUSTED: retry after `retry_after_s`
├── UnavailableError     UNAVAILABLE: no service there, or none that can serve now; retry
├── TimeoutExceededError DEADLINE_EXCEEDED: the time of the request ran out
├── CancelledError       CANCELLED: the call was cancelled or aborted
├── IncompatibleError    FAILED_PRECONDITION or UNIMPLEMENTED: the service cannot do this
└── ServerError          any other status, or an answer that breaks the protocol
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What a service says beside status and message. Empty text means that it did not say.

    Attributes:
        reason: Machine-readable cause, e.g. "PROMPT_TOO_LONG".
        field: The field at fault.
        value: What it held.
        limit: What is allowed.
        retry_after_s: When a retry makes sense, in seconds; None means not said.
    """

    reason: str = ""
    field: str = ""
    value: str = ""
    limit: str = ""
    retry_after_s: float | None = None


class ClientError(Exception):
    """Base of all errors of the client.

    Attributes:
        status: The gRPC status.
        message: What the service said, for people.
        details: What it said for programs.
        retryable: Whether the same request can succeed later or elsewhere.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self, status: grpc.StatusCode, message: str, details: ErrorDetails | None = None
    ) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.details = details or ErrorDetails()

    @property
    def reason(self) -> str:
        """Machine-readable cause; empty when the service gave none."""
        return self.details.reason

    @property
    def field(self) -> str:
        """The field at fault; empty when none is."""
        return self.details.field

    @property
    def value(self) -> str:
        """What the field held."""
        return self.details.value

    @property
    def limit(self) -> str:
        """What the field may hold."""
        return self.details.limit


class InvalidInputError(ClientError):
    """A field of the request is wrong; sending it again cannot help."""

    @classmethod
    def local(cls, field: str, value: object, limit: str) -> InvalidInputError:
        """The error for a value that the protocol cannot carry, so it was never sent."""
        details = ErrorDetails(reason="INVALID_REQUEST", field=field, value=str(value), limit=limit)
        message = f"{field} = {value}: must be {limit}"
        return cls(grpc.StatusCode.INVALID_ARGUMENT, message, details)


class NotFoundError(ClientError):
    """What the request names is not there."""


class OverloadedError(ClientError):
    """A queue or a pool is full."""

    retryable = True

    @property
    def retry_after_s(self) -> float | None:
        """When a retry makes sense, in seconds; None means that the service did not say."""
        return self.details.retry_after_s


class UnavailableError(ClientError):
    """Nobody answers at the address, or the service cannot serve now."""

    retryable = True

    @property
    def retry_after_s(self) -> float | None:
        """When a retry makes sense, in seconds; None means that the service did not say."""
        return self.details.retry_after_s


class TimeoutExceededError(ClientError):
    """The time of the request ran out."""


class CancelledError(ClientError):
    """The call was cancelled or aborted."""


class IncompatibleError(ClientError):
    """The service cannot do this."""


class ServerError(ClientError):
    """The service failed, or broke the protocol."""


_CLASSES: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInputError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidInputError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimeoutExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatibleError,
    grpc.StatusCode.UNIMPLEMENTED: IncompatibleError,
}


class FailedCall(Protocol):
    """What the blocking and the asynchronous gRPC errors have in common."""

    def code(self) -> grpc.StatusCode:
        """The status."""
        ...

    def details(self) -> str | None:
        """The message."""
        ...

    def trailing_metadata(self) -> object:
        """Pairs of key and value, or None."""
        ...


def error_from_call(call: FailedCall) -> ClientError:
    """The typed error of a failed call."""
    status = call.code()
    error_class = _CLASSES.get(status, ServerError)
    return error_class(status, call.details() or "", _read_details(call.trailing_metadata()))


def _read_details(metadata: object) -> ErrorDetails:
    encoded = _metadata_value(metadata, _DETAILS_KEY)
    if not isinstance(encoded, bytes):
        return ErrorDetails()
    status = status_pb2.Status()
    try:
        status.ParseFromString(encoded)
    except DecodeError:  # A foreign service's details; its status and message still hold.
        return ErrorDetails()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for packed in status.details:
        packed.Unpack(info)
        if packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    said = info.metadata
    return ErrorDetails(
        reason=info.reason,
        field=said.get("field", ""),
        value=said.get("value", ""),
        limit=said.get("limit", ""),
        retry_after_s=retry_after_s,
    )


def _metadata_value(metadata: object, wanted: str) -> str | bytes | None:
    """Value of one key of gRPC metadata, which iterates over pairs in both flavours."""
    if metadata is None:
        return None
    for key, value in metadata:  # type: ignore[attr-defined]  # the two flavours share no type
        if key == wanted and isinstance(value, str | bytes):
            return value
    return None


def text_metadata(metadata: object, key: str) -> str | None:
    """Text of one key of gRPC metadata; None when it is absent or binary."""
    value = _metadata_value(metadata, key)
    return value if isinstance(value, str) else None
