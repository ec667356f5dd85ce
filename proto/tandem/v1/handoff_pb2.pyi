import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("id", "decode_incarnation", "prefill_incarnation", "block_ids", "row_start", "row_end", "lease", "mac", "slots")
    ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    decode_incarnation: str
    prefill_incarnation: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    row_start: int
    row_end: int
    lease: _duration_pb2.Duration
    mac: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[bytes] = ..., decode_incarnation: _Optional[str] = ..., prefill_incarnation: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., row_start: _Optional[int] = ..., row_end: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., mac: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("ticket_id", "ticket_mac", "layer", "component", "rank", "chunk", "row_start", "row_end", "size_bytes", "digest", "slot")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_MAC_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_END_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    ticket_mac: bytes
    layer: int
    component: str
    rank: int
    chunk: int
    row_start: int
    row_end: int
    size_bytes: int
    digest: int
    slot: int
    def __init__(self, ticket_id: _Optional[bytes] = ..., ticket_mac: _Optional[bytes] = ..., layer: _Optional[int] = ..., component: _Optional[str] = ..., rank: _Optional[int] = ..., chunk: _Optional[int] = ..., row_start: _Optional[int] = ..., row_end: _Optional[int] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "banned_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., banned_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
