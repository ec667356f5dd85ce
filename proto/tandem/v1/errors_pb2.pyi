from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_INVALID_REQUEST: _ClassVar[FailureReason]
    FAILURE_REASON_OVERLOADED: _ClassVar[FailureReason]
    FAILURE_REASON_SESSION_UNKNOWN: _ClassVar[FailureReason]
    FAILURE_REASON_TICKET_REJECTED: _ClassVar[FailureReason]
    FAILURE_REASON_LEASE_EXPIRED: _ClassVar[FailureReason]
    FAILURE_REASON_WRITE_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_COMPUTE_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE_EXCEEDED: _ClassVar[FailureReason]
    FAILURE_REASON_DRAINING: _ClassVar[FailureReason]
    FAILURE_REASON_LAYOUT_MISMATCH: _ClassVar[FailureReason]
    FAILURE_REASON_LINK_BROKEN: _ClassVar[FailureReason]
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_INVALID_REQUEST: FailureReason
FAILURE_REASON_OVERLOADED: FailureReason
FAILURE_REASON_SESSION_UNKNOWN: FailureReason
FAILURE_REASON_TICKET_REJECTED: FailureReason
FAILURE_REASON_LEASE_EXPIRED: FailureReason
FAILURE_REASON_WRITE_FAILED: FailureReason
FAILURE_REASON_COMPUTE_FAILED: FailureReason
FAILURE_REASON_DEADLINE_EXCEEDED: FailureReason
FAILURE_REASON_DRAINING: FailureReason
FAILURE_REASON_LAYOUT_MISMATCH: FailureReason
FAILURE_REASON_LINK_BROKEN: FailureReason

class Failure(_message.Message):
    __slots__ = ("reason", "message", "layer", "rank")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    message: str
    layer: int
    rank: int
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ..., layer: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...
