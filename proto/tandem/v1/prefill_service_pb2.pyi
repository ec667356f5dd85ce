import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tandem.v1 import errors_pb2 as _errors_pb2
from tandem.v1 import handoff_pb2 as _handoff_pb2
from tandem.v1 import layout_pb2 as _layout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version", "decode_incarnation", "layout", "region", "max_model_len")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    decode_incarnation: str
    layout: _layout_pb2.KvLayout
    region: _layout_pb2.KvRegion
    max_model_len: int
    def __init__(self, protocol_version: _Optional[int] = ..., decode_incarnation: _Optional[str] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ..., region: _Optional[_Union[_layout_pb2.KvRegion, _Mapping]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("session_id", "prefill_incarnation", "layout", "max_prompt_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefill_incarnation: str
    layout: _layout_pb2.KvLayout
    max_prompt_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., prefill_incarnation: _Optional[str] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ..., max_prompt_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "grant", "renew", "revoke", "slots_freed")
    START_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREED_FIELD_NUMBER: _ClassVar[int]
    start: Start
    grant: Grant
    renew: Renew
    revoke: Revoke
    slots_freed: SlotsFreed
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., slots_freed: _Optional[_Union[SlotsFreed, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("admitted", "starting_soon", "progress", "first", "drained", "failed", "heartbeat")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    STARTING_SOON_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    starting_soon: StartingSoon
    progress: Progress
    first: First
    drained: Drained
    failed: Failed
    heartbeat: Heartbeat
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., starting_soon: _Optional[_Union[StartingSoon, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., first: _Optional[_Union[First, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("session_id", "handoff_id", "prompt_token_ids", "push_from_token", "num_output_tokens", "sampling", "timeout")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    handoff_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    push_from_token: int
    num_output_tokens: int
    sampling: _handoff_pb2.SamplingParams
    timeout: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[str] = ..., handoff_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., push_from_token: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_handoff_pb2.SamplingParams, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _handoff_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_handoff_pb2.Ticket, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    def __init__(self, ticket_id: _Optional[bytes] = ...) -> None: ...

class SlotsFreed(_message.Message):
    __slots__ = ("ticket_id", "slots")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket_id: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("ticket_id", "cause")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    cause: str
    def __init__(self, ticket_id: _Optional[bytes] = ..., cause: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("num_pending_tokens",)
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_pending_tokens: int
    def __init__(self, num_pending_tokens: _Optional[int] = ...) -> None: ...

class StartingSoon(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[_handoff_pb2.Receipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[_handoff_pb2.Receipt, _Mapping]]] = ...) -> None: ...

class First(_message.Message):
    __slots__ = ("token_ids", "num_cached_tokens", "queue_time", "compute_time")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_cached_tokens: int
    queue_time: _duration_pb2.Duration
    compute_time: _duration_pb2.Duration
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_cached_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., compute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drained(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    def __init__(self, ticket_id: _Optional[bytes] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _errors_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_errors_pb2.Failure, _Mapping]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("ticket_id", "cause")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    cause: str
    def __init__(self, ticket_id: _Optional[bytes] = ..., cause: _Optional[str] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ("prefill_incarnation",)
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefill_incarnation: str
    def __init__(self, prefill_incarnation: _Optional[str] = ...) -> None: ...

class GetPoolStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolStatusResponse(_message.Message):
    __slots__ = ("num_blocks", "num_free_blocks", "num_evictable_blocks", "num_queued_jobs", "num_active_jobs", "num_pushed_bytes", "prefill_incarnation")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_queued_jobs: int
    num_active_jobs: int
    num_pushed_bytes: int
    prefill_incarnation: str
    def __init__(self, num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_evictable_blocks: _Optional[int] = ..., num_queued_jobs: _Optional[int] = ..., num_active_jobs: _Optional[int] = ..., num_pushed_bytes: _Optional[int] = ..., prefill_incarnation: _Optional[str] = ...) -> None: ...
