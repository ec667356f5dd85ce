"""The paged KV cache: one flat buffer of bytes, seen as typed tensors per layer and component.

Rows are what the services move: row r of block b is the state of one token in one layer. Row
conventions, part of the handshake between the services:

    latent      normed key/value latent
    rope        rotated key part in half-split order (even channels, then odd ones)
    index_key   normed and rotated indexer key; rotary channels first, in the checkpoint's order

The cache owns nothing but its views. Blocks are handed out elsewhere. Content of rows that no
token was written to is undefined and never matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.errors import AttentionConfigError
from attention_core.shape import AttentionShape

LATENT = "latent"
ROPE = "rope"
INDEX_KEY = "index_key"

ALIGNMENT_BYTES = 64
"""Every component tensor starts at a multiple of this: one cache line, and any dtype's need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvComponent:
    """One tensor of a layer's cache.

    Attributes:
        name: "latent", "rope" or "index_key".
        dtype: Element type.
        width: Elements in one row.
    """

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize


LayerComponents = tuple[KvComponent, ...]
"""Components of one layer, in buffer order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKv:
    """Cache tensors of one layer.

    Attributes:
        latent: [nb, bs, L].
        rope: [nb, bs, R].
        index_key: [nb, bs, Di]; None in a layer without an indexer.
    """

    latent: Tensor
    rope: Tensor
    index_key: Tensor | None


def layer_components(
    shape: AttentionShape, *, dtype: torch.dtype, has_indexer: bool
) -> LayerComponents:
    """Components of a layer, in the order latent, rope, index_key."""
    components = (
        KvComponent(name=LATENT, dtype=dtype, width=shape.kv_lora_rank),
        KvComponent(name=ROPE, dtype=dtype, width=shape.qk_rope_head_dim),
    )
    if not has_indexer:
        return components
    return (*components, KvComponent(name=INDEX_KEY, dtype=dtype, width=shape.indexer.head_dim))


class PagedKvCache:
    """All layers' cache tensors over one flat buffer.

    Buffer order is layer by layer, component by component, each component's blocks contiguous.

    Attributes:
        buffer: uint8 [at least size_bytes]; whoever gave or allocated it owns its life.
        components: Components of each layer.
        layers: Tensors of each layer, views of buffer.
        num_blocks: nb.
        block_size: bs, rows in a block.
    """

    def __init__(
        self,
        buffer: Tensor,
        components: Sequence[LayerComponents],
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """See :meth:`over`, which callers use."""
        self.buffer = buffer
        self.components = tuple(components)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._offsets, _ = _offsets(self.components, num_blocks * block_size)
        views = [
            {component.name: self._view(layer, component) for component in self.components[layer]}
            for layer in range(len(self.components))
        ]
        self._tensors: tuple[dict[str, Tensor], ...] = tuple(views)
        self.layers = tuple(
            LayerKv(latent=view[LATENT], rope=view[ROPE], index_key=view.get(INDEX_KEY))
            for view in views
        )

    @classmethod
    def allocate(
        cls,
        components: Sequence[LayerComponents],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> PagedKvCache:
        """A cache over a new zeroed buffer that it owns.

        Raises:
            AttentionConfigError: num_blocks, block_size or the components are impossible.
        """
        size = cls.size_bytes(components, num_blocks=num_blocks, block_size=block_size)
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls.over(buffer, components, num_blocks=num_blocks, block_size=block_size)

    @classmethod
    def over(
        cls,
        buffer: Tensor,
        components: Sequence[LayerComponents],
        *,
        num_blocks: int,
        block_size: int,
    ) -> PagedKvCache:
        """A cache over memory that the caller owns; nothing is written.

        Args:
            buffer: uint8 [n], contiguous, n >= size_bytes(...), start aligned to 64 bytes.
            components: Components of each layer.
            num_blocks: nb.
            block_size: bs.

        Raises:
            AttentionConfigError: The buffer is too small, misaligned or not flat bytes.
        """
        size = cls.size_bytes(components, num_blocks=num_blocks, block_size=block_size)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            described = f"{buffer.dtype} {tuple(buffer.shape)}"
            raise AttentionConfigError("buffer", described, "contiguous one-dimensional uint8")
        if buffer.numel() < size:
            raise AttentionConfigError("buffer", f"{buffer.numel()} bytes", f"at least {size}")
        if buffer.data_ptr() % ALIGNMENT_BYTES:
            raise AttentionConfigError(
                "buffer", f"at address {buffer.data_ptr():#x}", f"aligned to {ALIGNMENT_BYTES}"
            )
        return cls(buffer, components, num_blocks=num_blocks, block_size=block_size)

    @staticmethod
    def size_bytes(
        components: Sequence[LayerComponents], *, num_blocks: int, block_size: int
    ) -> int:
        """Bytes that a cache needs, alignment included.

        Raises:
            AttentionConfigError: num_blocks, block_size or the components are impossible.
        """
        if num_blocks < 1:
            raise AttentionConfigError("num_blocks", num_blocks, "at least 1")
        if block_size < 1:
            raise AttentionConfigError("block_size", block_size, "at least 1")
        allowed = ((LATENT, ROPE), (LATENT, ROPE, INDEX_KEY))
        for layer, layer_parts in enumerate(components):
            names = tuple(component.name for component in layer_parts)
            if names not in allowed:
                raise AttentionConfigError(f"components of layer {layer}", names, allowed)
        return _offsets(components, num_blocks * block_size)[1]

    def tensor(self, layer: int, component: str) -> Tensor:
        """The [nb, bs, width] tensor of a component.

        Raises:
            AttentionConfigError: The layer has no such component.
        """
        self._require_component(layer, component)
        return self._tensors[layer][component]

    def storage_offset_bytes(self, layer: int, component: str) -> int:
        """Where a component's tensor starts, in bytes from the start of the buffer.

        Raises:
            AttentionConfigError: The layer has no such component.
        """
        self._require_component(layer, component)
        return self._offsets[layer][component]

    def _require_component(self, layer: int, component: str) -> None:
        if not 0 <= layer < len(self.components):
            raise AttentionConfigError("layer", layer, f"in 0..{len(self.components) - 1}")
        names = tuple(part.name for part in self.components[layer])
        if component not in names:
            raise AttentionConfigError(f"component of layer {layer}", component, f"one of {names}")

    def _view(self, layer: int, component: KvComponent) -> Tensor:
        start = self._offsets[layer][component.name]
        size = self.num_blocks * self.block_size * component.row_bytes
        typed = self.buffer[start : start + size].view(component.dtype)
        return typed.view(self.num_blocks, self.block_size, component.width)


def _offsets(
    components: Sequence[LayerComponents], num_rows: int
) -> tuple[tuple[dict[str, int], ...], int]:
    """Start of every component, by layer and name, and the end of the last one."""
    offsets: list[dict[str, int]] = []
    end = 0
    for layer_parts in components:
        starts: dict[str, int] = {}
        for component in layer_parts:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            starts[component.name] = start
            end = start + num_rows * component.row_bytes
        offsets.append(starts)
    return tuple(offsets), end
