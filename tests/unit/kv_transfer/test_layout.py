"""What two services compare, and what a region must be."""

from dataclasses import replace

import pytest

from kv_transfer.errors import LayoutError
from kv_transfer.layout import (
    ComponentLayout,
    ComponentRegion,
    LayerLayout,
    Mismatch,
    RegionMap,
    compare,
    placements,
)
from tests.support.kv_pools import make_layout, make_region

LAYOUT = make_layout()
REGION = make_region(LAYOUT, num_blocks=5)


def test_compare_equal_layouts_finds_nothing() -> None:
    assert compare(LAYOUT, make_layout()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("block_size", 8),
        ("num_ranks", 2),
        ("rope_convention", "interleaved"),
        ("digest_algorithm", "crc32"),
        ("speculation", "mtp"),
    ],
)
def test_compare_one_field_differs_names_it_with_both_values(field: str, value: object) -> None:
    theirs = replace(LAYOUT, **{field: value})
    assert compare(LAYOUT, theirs) == [
        Mismatch(field=field, ours=str(getattr(LAYOUT, field)), theirs=str(value))
    ]


def test_compare_components_differ_names_layer_and_component() -> None:
    latent = LAYOUT.layers[1].components[0]
    changed = replace(latent, dtype="bfloat16", row_bytes=12)
    layer = LayerLayout(components=(changed, *LAYOUT.layers[1].components[1:]))
    theirs = replace(LAYOUT, layers=(LAYOUT.layers[0], layer))
    assert compare(LAYOUT, theirs) == [
        Mismatch(field="layers[1].latent.dtype", ours="float32", theirs="bfloat16"),
        Mismatch(field="layers[1].latent.row_bytes", ours="24", theirs="12"),
    ]


def test_compare_layer_without_an_indexer_is_named() -> None:
    theirs = replace(LAYOUT, layers=(LAYOUT.layers[1], LAYOUT.layers[1]))
    assert compare(LAYOUT, theirs) == [
        Mismatch(field="layers[0].components", ours="latent,rope,index_key", theirs="latent,rope")
    ]


def test_compare_number_of_layers_is_named_once() -> None:
    theirs = replace(LAYOUT, layers=LAYOUT.layers[:1])
    assert compare(LAYOUT, theirs) == [Mismatch(field="num_layers", ours="2", theirs="1")]


def test_layout_counts_components_of_all_layers() -> None:
    assert LAYOUT.num_components == 5


def test_layout_impossible_values_are_refused() -> None:
    with pytest.raises(LayoutError, match="block_size"):
        replace(LAYOUT, block_size=0)
    with pytest.raises(LayoutError, match="layers"):
        replace(LAYOUT, layers=())
    with pytest.raises(LayoutError, match="row_bytes"):
        ComponentLayout(name="latent", dtype="float32", row_bytes=0)
    with pytest.raises(LayoutError, match="unique"):
        LayerLayout(components=(LAYOUT.layers[0].components[0],) * 2)


def test_placements_of_a_good_region_give_every_component() -> None:
    places = placements(replace(REGION, base_address=1000), LAYOUT)
    assert len(places) == 5
    assert places[0, "latent"].base == 1003
    assert places[0, "latent"].start_of(5) == 1003 + 96 + 24


def change(index: int, **fields: object) -> RegionMap:
    entries = list(REGION.components)
    entries[index] = replace(entries[index], **fields)
    return replace(REGION, components=tuple(entries))


@pytest.mark.parametrize(
    ("region", "field"),
    [
        (replace(REGION, components=REGION.components[:-1]), "region.components"),
        (replace(REGION, components=REGION.components * 2), "listed twice"),
        (change(0, layer=7), "unknown"),
        (change(0, component="index_scale"), "unknown"),
        (change(0, base_bytes=-1), "base_bytes"),
        (change(0, block_stride_bytes=95), "block_stride_bytes"),
        (change(4, base_bytes=REGION.size_bytes - 199), "end"),
        (change(0, block_stride_bytes=1 << 60), "end"),
        (replace(REGION, num_blocks=0), "num_blocks"),
        (replace(REGION, size_bytes=REGION.size_bytes - 1), "end"),
    ],
)
def test_placements_of_a_bad_region_name_the_fault(region: RegionMap, field: str) -> None:
    with pytest.raises(LayoutError, match=field):
        placements(region, LAYOUT)


def test_placements_last_block_may_end_with_the_region() -> None:
    last = REGION.components[-1]
    assert last == ComponentRegion(
        layer=1, component="rope", base_bytes=REGION.size_bytes - 200, block_stride_bytes=40
    )
    assert placements(REGION, LAYOUT)[1, "rope"].base == REGION.size_bytes - 200
