"""Two small KV pools in one process: what a source and a target of a push look like.

The expected content of every byte is a pure function of (layer, component, row, byte), computed
row by row without any of the product's span arithmetic.
"""

from __future__ import annotations

import ctypes
import hashlib

from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    KvLayout,
    LayerLayout,
    RegionMap,
)

COMPONENTS = (("latent", 24), ("rope", 10), ("index_key", 6))


def make_layout(*, block_size: int = 4, num_layers: int = 2) -> KvLayout:
    """A layout whose odd layers lack an indexer key."""
    return KvLayout(
        model_fingerprint="model",
        block_size=block_size,
        layers=tuple(
            LayerLayout(
                components=tuple(
                    ComponentLayout(name=name, dtype="float32", row_bytes=row_bytes)
                    for name, row_bytes in (COMPONENTS if layer % 2 == 0 else COMPONENTS[:2])
                )
            )
            for layer in range(num_layers)
        ),
    )


def make_region(
    layout: KvLayout, *, num_blocks: int, base_address: int = 0, padding_bytes: int = 0
) -> RegionMap:
    """A region in which each component's blocks follow each other, with a gap after each block."""
    entries: list[ComponentRegion] = []
    at = 3  # nothing may rely on alignment
    for layer, parts in enumerate(layout.layers):
        for component in parts.components:
            stride = component.row_bytes * layout.block_size + padding_bytes
            entries.append(
                ComponentRegion(
                    layer=layer,
                    component=component.name,
                    base_bytes=at,
                    block_stride_bytes=stride,
                )
            )
            at += stride * num_blocks
    return RegionMap(
        num_blocks=num_blocks, size_bytes=at, base_address=base_address, components=tuple(entries)
    )


def row_content(tag: str, layer: int, component: str, row: int) -> bytes:
    """What a row of a sequence holds; `tag` tells sequences apart."""
    num_bytes = dict(COMPONENTS)[component]
    seed = f"{tag}/{layer}/{component}/{row}".encode()
    return hashlib.shake_128(seed).digest(num_bytes)


class PoolView:
    """Reads and writes single rows of a region in some memory; the naive model."""

    def __init__(self, memory: memoryview, region: RegionMap, layout: KvLayout) -> None:
        """Look at the region, whose offsets count from the start of `memory`."""
        self._memory = memory
        self._layout = layout
        self._entries = {(entry.layer, entry.component): entry for entry in region.components}

    def row(self, layer: int, component: str, block_ids: tuple[int, ...], row: int) -> memoryview:
        """The bytes of one row of a sequence."""
        entry = self._entries[layer, component]
        row_bytes = dict(COMPONENTS)[component]
        block = block_ids[row // self._layout.block_size]
        start = (
            entry.base_bytes
            + block * entry.block_stride_bytes
            + row % self._layout.block_size * row_bytes
        )
        return self._memory[start : start + row_bytes]

    def places(self) -> list[tuple[int, str]]:
        """Every (layer, component) in push order."""
        return list(self._entries)

    def fill(self, tag: str, block_ids: tuple[int, ...], num_rows: int) -> None:
        """Write the expected content of a sequence."""
        for layer, component in self._entries:
            for row in range(num_rows):
                self.row(layer, component, block_ids, row)[:] = row_content(
                    tag, layer, component, row
                )

    def holds(self, tag: str, block_ids: tuple[int, ...], rows: range) -> bool:
        """Whether all components hold the expected content in the rows."""
        return all(
            self.row(layer, component, block_ids, row) == row_content(tag, layer, component, row)
            for layer, component in self._entries
            for row in rows
        )


class SourcePool:
    """A source pool with an address."""

    def __init__(self, layout: KvLayout, *, num_blocks: int, padding_bytes: int = 0) -> None:
        """Allocate it zeroed."""
        relative = make_region(layout, num_blocks=num_blocks, padding_bytes=padding_bytes)
        self.memory = bytearray(relative.size_bytes)
        self._anchor = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        address = ctypes.addressof(self._anchor)
        self.region = make_region(
            layout, num_blocks=num_blocks, base_address=address, padding_bytes=padding_bytes
        )
        self.view = PoolView(memoryview(self.memory), relative, layout)
