from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvComponent(_message.Message):
    __slots__ = ("name", "dtype", "row_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    row_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class KvLayer(_message.Message):
    __slots__ = ("components",)
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[KvComponent]
    def __init__(self, components: _Optional[_Iterable[_Union[KvComponent, _Mapping]]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "block_size", "num_ranks", "rope_convention", "digest_algorithm", "speculation", "layers")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ROPE_CONVENTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    block_size: int
    num_ranks: int
    rope_convention: str
    digest_algorithm: str
    speculation: str
    layers: _containers.RepeatedCompositeFieldContainer[KvLayer]
    def __init__(self, model_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_ranks: _Optional[int] = ..., rope_convention: _Optional[str] = ..., digest_algorithm: _Optional[str] = ..., speculation: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[KvLayer, _Mapping]]] = ...) -> None: ...

class ComponentRegion(_message.Message):
    __slots__ = ("layer", "component", "base_bytes", "block_stride_bytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    component: str
    base_bytes: int
    block_stride_bytes: int
    def __init__(self, layer: _Optional[int] = ..., component: _Optional[str] = ..., base_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("engine", "address", "access_key", "size_bytes", "num_blocks", "components", "slot_bytes", "num_slots")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ACCESS_KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    address: str
    access_key: bytes
    size_bytes: int
    num_blocks: int
    components: _containers.RepeatedCompositeFieldContainer[ComponentRegion]
    slot_bytes: int
    num_slots: int
    def __init__(self, engine: _Optional[str] = ..., address: _Optional[str] = ..., access_key: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., components: _Optional[_Iterable[_Union[ComponentRegion, _Mapping]]] = ..., slot_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...
