"""What the KV of one model looks like, and where it lies in a memory region.

A `KvLayout` is what two services must agree on before KV may move. A `RegionMap` says where each
component of each layer begins in one memory; `placements` joins the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kv_transfer.digest import DIGEST_ALGORITHM
from kv_transfer.errors import LayoutError
from kv_transfer.spans import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLayout:
    """One tensor of a layer's KV cache.

    Attributes:
        name: "latent", "rope", "index_key"; unique inside its layer.
        dtype: Element type as torch prints it without its prefix, e.g. "float32".
        row_bytes: Size of one token's row.
    """

    name: str
    dtype: str
    row_bytes: int

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            LayoutError: A name or dtype is empty, or a row has no byte.
        """
        _check(bool(self.name), "component.name", self.name, "not empty")
        _check(bool(self.dtype), f"{self.name}.dtype", self.dtype, "not empty")
        _check(self.row_bytes > 0, f"{self.name}.row_bytes", self.row_bytes, ">= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """The components of one layer in the order in which they are pushed."""

    components: tuple[ComponentLayout, ...]

    def __post_init__(self) -> None:
        """Refuse a layer without components, or with two of one name.

        Raises:
            LayoutError: As said.
        """
        names = [component.name for component in self.components]
        _check(bool(names), "layer.components", "empty", "not empty")
        _check(len(set(names)) == len(names), "layer.components", names, "unique names")

    @property
    def row_bytes(self) -> int:
        """Size of one token's row of all components."""
        return sum(component.row_bytes for component in self.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Everything two services must agree on before KV may move between them.

    Attributes:
        model_fingerprint: Identifies architecture and weights.
        block_size: Token rows per block.
        num_ranks: Ranks that hold this layout.
        rope_convention: How rotated pairs lie in a row.
        digest_algorithm: Digest of receipts.
        speculation: Names the draft whose KV is part of the layout; empty means none.
        layers: In model order.
    """

    model_fingerprint: str
    block_size: int
    num_ranks: int = 1
    rope_convention: str = "half_split"
    digest_algorithm: str = DIGEST_ALGORITHM
    speculation: str = ""
    layers: tuple[LayerLayout, ...]

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            LayoutError: A count is below one, or a name is empty.
        """
        _check(self.block_size > 0, "block_size", self.block_size, ">= 1")
        _check(self.num_ranks > 0, "num_ranks", self.num_ranks, ">= 1")
        _check(bool(self.layers), "layers", "empty", "not empty")
        _check(bool(self.model_fingerprint), "model_fingerprint", "empty", "not empty")

    @property
    def num_components(self) -> int:
        """Number of components summed over all layers."""
        return sum(len(layer.components) for layer in self.layers)

    def num_covered(self, layer: int, component: str) -> int:
        """Return how many components a receipt names: one, or all of the layer."""
        return 1 if component else len(self.layers[layer].components)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One field in which two layouts differ; the values are printable."""

    field: str
    ours: str
    theirs: str


def compare(ours: KvLayout, theirs: KvLayout) -> list[Mismatch]:
    """Return every field in which two layouts differ; empty means that KV may move."""
    found: list[Mismatch] = []

    def note(field: str, one: object, other: object) -> None:
        if one != other:
            found.append(Mismatch(field=field, ours=str(one), theirs=str(other)))

    note("model_fingerprint", ours.model_fingerprint, theirs.model_fingerprint)
    note("block_size", ours.block_size, theirs.block_size)
    note("num_ranks", ours.num_ranks, theirs.num_ranks)
    note("rope_convention", ours.rope_convention, theirs.rope_convention)
    note("digest_algorithm", ours.digest_algorithm, theirs.digest_algorithm)
    note("speculation", ours.speculation, theirs.speculation)
    note("num_layers", len(ours.layers), len(theirs.layers))
    # A differing number of layers is named once, not once per missing layer.
    for index, (one, other) in enumerate(zip(ours.layers, theirs.layers, strict=False)):
        names = [component.name for component in one.components]
        their_names = [component.name for component in other.components]
        note(f"layers[{index}].components", ",".join(names), ",".join(their_names))
        if names == their_names:
            for mine, yours in zip(one.components, other.components, strict=True):
                prefix = f"layers[{index}].{mine.name}"
                note(f"{prefix}.dtype", mine.dtype, yours.dtype)
                note(f"{prefix}.row_bytes", mine.row_bytes, yours.row_bytes)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRegion:
    """Where one component of one layer lies.

    Attributes:
        layer: Index into `KvLayout.layers`.
        component: Name inside that layer.
        base_bytes: Offset of block 0 from `RegionMap.base_address`.
        block_stride_bytes: Distance between consecutive blocks.
    """

    layer: int
    component: str
    base_bytes: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMap:
    """Where the blocks of one KV pool lie.

    Attributes:
        num_blocks: Blocks of the pool; the same for every component.
        size_bytes: Length of the region.
        base_address: Added to every `base_bytes`: the absolute address of a local (source) region,
            0 for a remote (target) region, whose addresses are offsets.
        components: One entry per (layer, component).
    """

    num_blocks: int
    size_bytes: int
    base_address: int
    components: tuple[ComponentRegion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingMap:
    """The slots of a staging ring, as offsets in a target; slot i begins at i * slot_bytes.

    Attributes:
        num_blocks: Blocks of the pool that the rows are copied to in the end.
        num_slots: Number of slots.
        slot_bytes: Size of each.
    """

    num_blocks: int
    num_slots: int
    slot_bytes: int

    @property
    def size_bytes(self) -> int:
        """Length of the ring."""
        return self.num_slots * self.slot_bytes

    def rows_per_slot(self, layout: KvLayout) -> tuple[int, ...]:
        """Return, for each layer, how many rows of all its components fit one slot.

        Raises:
            LayoutError: There is no slot, or not one row fits.
        """
        _check(self.num_blocks > 0, "region.num_blocks", self.num_blocks, ">= 1")
        _check(self.num_slots > 0, "region.num_slots", self.num_slots, ">= 1")
        widest = max(layer.row_bytes for layer in layout.layers)
        _check(self.slot_bytes >= widest, "region.slot_bytes", self.slot_bytes, f">= {widest}")
        return tuple(self.slot_bytes // layer.row_bytes for layer in layout.layers)


def with_block_size(layout: KvLayout, block_size: int) -> KvLayout:
    """Return the layout with another block size."""
    return replace(layout, block_size=block_size)


def placements(region: RegionMap, layout: KvLayout) -> Mapping[tuple[int, str], Placement]:
    """Return the placement of every (layer, component) of a region.

    Args:
        region: The region; it may come from a peer and is checked.
        layout: The layout of the side that owns the region, with that side's block size.

    Raises:
        LayoutError: A component is missing, doubled or unknown, or leaves the region.
    """
    _check(region.num_blocks > 0, "region.num_blocks", region.num_blocks, ">= 1")
    rows = {
        (index, component.name): component.row_bytes
        for index, layer in enumerate(layout.layers)
        for component in layer.components
    }
    result: dict[tuple[int, str], Placement] = {}
    for entry in region.components:
        key = (entry.layer, entry.component)
        name = f"region.layers[{entry.layer}].{entry.component}"
        _check(key in rows, name, "unknown", "a component of the layout")
        _check(key not in result, name, "listed twice", "once")
        block_bytes = rows[key] * layout.block_size
        stride = entry.block_stride_bytes
        _check(entry.base_bytes >= 0, f"{name}.base_bytes", entry.base_bytes, ">= 0")
        _check(stride >= block_bytes, f"{name}.block_stride_bytes", stride, f">= {block_bytes}")
        end = entry.base_bytes + (region.num_blocks - 1) * stride + block_bytes
        _check(end <= region.size_bytes, f"{name} end", end, f"<= {region.size_bytes}")
        result[key] = Placement(
            base=region.base_address + entry.base_bytes,
            block_stride_bytes=stride,
            block_size=layout.block_size,
            row_bytes=rows[key],
        )
    missing = rows.keys() - result.keys()
    _check(not missing, "region.components", f"without {sorted(missing)}", "every component")
    return result


def _check(holds: bool, field: str, value: object, limit: object) -> None:
    if not holds:
        raise LayoutError(field, value, limit)
