"""Views of one flat buffer: where every row lies, and what is refused."""

from __future__ import annotations

import pytest
import torch

from attention_core.errors import AttentionConfigError
from attention_core.paged_kv import ALIGNMENT_BYTES, KvComponent, PagedKvCache, layer_components
from tests.support.attention import small_shape

NUM_BLOCKS, BLOCK_SIZE = 5, 3


def three_layers(dtype: torch.dtype = torch.float32) -> list[tuple[KvComponent, ...]]:
    """The middle layer has no indexer."""
    return [
        layer_components(small_shape(), dtype=dtype, has_indexer=has_indexer)
        for has_indexer in (True, False, True)
    ]


def allocate(dtype: torch.dtype = torch.float32) -> PagedKvCache:
    return PagedKvCache.allocate(three_layers(dtype), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def test_layer_components_come_in_buffer_order_with_their_widths() -> None:
    with_indexer, without, _ = three_layers(torch.bfloat16)
    assert [(part.name, part.width, part.row_bytes) for part in with_indexer] == [
        ("latent", 10, 20),
        ("rope", 4, 8),
        ("index_key", 9, 18),
    ]
    assert without == with_indexer[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_cache_has_typed_zeroed_tensors_per_layer(dtype: torch.dtype) -> None:
    cache = allocate(dtype)
    first, middle, last = cache.layers
    assert first.latent.shape == (NUM_BLOCKS, BLOCK_SIZE, 10)
    assert first.rope.shape == (NUM_BLOCKS, BLOCK_SIZE, 4)
    assert last.index_key is not None
    assert last.index_key.shape == (NUM_BLOCKS, BLOCK_SIZE, 9)
    assert middle.index_key is None
    assert first.latent.dtype == dtype
    assert not cache.buffer.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_offsets_lead_to_the_bytes_of_each_component(dtype: torch.dtype) -> None:
    cache = allocate(dtype)
    marked = 0
    for layer, components in enumerate(cache.components):
        for part in components:
            marked += 1
            tensor = cache.tensor(layer, part.name)
            tensor.fill_(marked)
            offset = cache.storage_offset_bytes(layer, part.name)
            assert offset % ALIGNMENT_BYTES == 0
            assert tensor.data_ptr() == cache.buffer.data_ptr() + offset
            assert tensor.is_contiguous()
    # Nothing overlaps: every tensor still holds its own mark.
    marked = 0
    for layer, components in enumerate(cache.components):
        for part in components:
            marked += 1
            assert (cache.tensor(layer, part.name) == marked).all()


def test_layers_are_views_of_the_same_tensors() -> None:
    cache = allocate()
    cache.layers[2].rope[4, 2] = 7.0
    assert (cache.tensor(2, "rope")[4, 2] == 7.0).all()
    row = cache.storage_offset_bytes(2, "rope") + (4 * BLOCK_SIZE + 2) * 4 * 4
    assert cache.buffer[row : row + 16].view(torch.float32).tolist() == [7.0] * 4


def test_over_foreign_memory_writes_nothing_and_sees_its_bytes() -> None:
    size = PagedKvCache.size_bytes(three_layers(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    buffer = torch.full((size + 100,), 0x11, dtype=torch.uint8)
    before = buffer.clone()
    cache = PagedKvCache.over(buffer, three_layers(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    assert torch.equal(buffer, before)
    buffer.zero_()
    assert not cache.layers[0].latent.any()
    cache.layers[2].latent.fill_(1.0)
    assert buffer.any()
    assert not buffer[size:].any()


def test_size_bytes_is_exact_for_the_last_row() -> None:
    cache = allocate()
    last = cache.tensor(2, "index_key")
    end = cache.storage_offset_bytes(2, "index_key") + last.numel() * last.element_size()
    assert cache.buffer.numel() == end


def test_over_memory_that_does_not_fit_names_the_fault() -> None:
    components = three_layers()
    size = PagedKvCache.size_bytes(components, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    roomy = torch.zeros(2 * size + ALIGNMENT_BYTES, dtype=torch.uint8)
    wrong = {
        "at least": roomy[: size - 1],
        "uint8": roomy.view(torch.int8),
        "one-dimensional": roomy.view(1, -1),
        "contiguous": roomy[::2],
        "aligned": roomy[1:],
    }
    for words, buffer in wrong.items():
        with pytest.raises(AttentionConfigError, match=words) as caught:
            PagedKvCache.over(buffer, components, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        assert caught.value.field == "buffer"


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
def test_cache_without_blocks_or_rows_is_refused(field: str) -> None:
    sizes = {"num_blocks": 2, "block_size": 2, field: 0}
    with pytest.raises(AttentionConfigError) as caught:
        PagedKvCache.allocate(three_layers(), **sizes)
    assert caught.value.field == field


def test_cache_with_components_in_another_order_is_refused_by_layer() -> None:
    components = three_layers()
    components[1] = components[1][::-1]
    with pytest.raises(AttentionConfigError, match="layer 1"):
        PagedKvCache.size_bytes(components, num_blocks=1, block_size=1)


def test_component_that_a_layer_lacks_is_refused_by_name() -> None:
    cache = allocate()
    for look_up in (cache.tensor, cache.storage_offset_bytes):
        with pytest.raises(AttentionConfigError, match=r"layer 1 is 'index_key'"):
            look_up(1, "index_key")
        for layer in (-1, 3):
            with pytest.raises(AttentionConfigError, match=r"in 0\.\.2"):
                look_up(layer, "latent")
