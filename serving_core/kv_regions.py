"""Where attention's tensors become transfer's addresses; the only place that knows both."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from attention_core.paged_kv import LayerComponents, PagedKvCache
from kv_transfer.engine.base import TargetMemory
from kv_transfer.landing import PoolMemory
from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    KvLayout,
    LayerLayout,
    RegionMap,
)


class HasKvComponents(Protocol):
    """A model, as far as the layout of its KV is concerned."""

    @property
    def kv_components(self) -> Sequence[LayerComponents]:
        """Components of each layer."""


def kv_layout(model: HasKvComponents, block_size: int, fingerprint: str) -> KvLayout:
    """Return what both services must agree on before the model's KV may move.

    Args:
        model: The loaded model.
        block_size: Token rows per block of the own pool.
        fingerprint: Identifies architecture and weights.

    Raises:
        LayoutError: A value is impossible.
    """
    return KvLayout(
        model_fingerprint=fingerprint,
        block_size=block_size,
        layers=tuple(
            LayerLayout(
                components=tuple(
                    ComponentLayout(
                        name=component.name,
                        dtype=str(component.dtype).removeprefix("torch."),
                        row_bytes=component.row_bytes,
                    )
                    for component in components
                )
            )
            for components in model.kv_components
        ),
    )


def source_region(cache: PagedKvCache) -> RegionMap:
    """Return where the rows of a cache lie, in absolute addresses of this process.

    The addresses hold as long as the cache's buffer lives; the caller keeps it.
    """
    return _region(cache, base_address=cache.buffer.data_ptr(), base_offset=0)


def target_region_map(cache: PagedKvCache, base: int) -> RegionMap:
    """Return where the rows of a cache lie, as offsets in the memory that starts at `base`.

    Args:
        cache: A cache over a transfer target, see `cache_over_target`.
        base: Address of the target's first byte in this process.
    """
    return _region(cache, base_address=0, base_offset=cache.buffer.data_ptr() - base)


def pool_memory(cache: PagedKvCache) -> PoolMemory:
    """Return the memory of a cache as bytes; the cache keeps it alive, and must be kept."""
    array: Any = cache.buffer.numpy()
    return PoolMemory(view=memoryview(array).cast("B"), address=cache.buffer.data_ptr())


def target_size_bytes(
    components: Sequence[LayerComponents], *, num_blocks: int, block_size: int
) -> int:
    """Return how large a transfer target must be to hold a cache."""
    return PagedKvCache.size_bytes(components, num_blocks=num_blocks, block_size=block_size)


def cache_over_target(
    target: TargetMemory,
    components: Sequence[LayerComponents],
    *,
    num_blocks: int,
    block_size: int,
) -> PagedKvCache:
    """Return a cache whose tensors are the target's memory itself.

    The cache's tensors keep the mapping alive, even after `target.close()`.

    Raises:
        AttentionConfigError: The target is smaller than `target_size_bytes`.
    """
    buffer = torch.frombuffer(target.buffer, dtype=torch.uint8)
    return PagedKvCache.over(buffer, components, num_blocks=num_blocks, block_size=block_size)


def _region(cache: PagedKvCache, *, base_address: int, base_offset: int) -> RegionMap:
    size_bytes = PagedKvCache.size_bytes(
        cache.components, num_blocks=cache.num_blocks, block_size=cache.block_size
    )
    return RegionMap(
        num_blocks=cache.num_blocks,
        size_bytes=base_offset + size_bytes,
        base_address=base_address,
        components=tuple(
            ComponentRegion(
                layer=layer,
                component=component.name,
                base_bytes=base_offset + cache.storage_offset_bytes(layer, component.name),
                block_stride_bytes=cache.block_size * component.row_bytes,
            )
            for layer, components in enumerate(cache.components)
            for component in components
        ),
    )
