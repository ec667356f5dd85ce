"""Tensors become addresses: a push between two real caches moves the rows that attention sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attention_core.errors import AttentionConfigError
from attention_core.paged_kv import KvComponent, LayerComponents, PagedKvCache
from kv_transfer.engine.base import TransferEngine
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.engine.shm import ShmEngine
from kv_transfer.layout import compare, placements
from kv_transfer.sender import PushJob, PushPipeline
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, TicketIssuer
from serving_core.kv_regions import (
    cache_over_target,
    kv_layout,
    source_region,
    target_region_map,
    target_size_bytes,
)
from tests.support.push_pair import FakeEvent

LATENT = KvComponent(name="latent", dtype=torch.bfloat16, width=20)
ROPE = KvComponent(name="rope", dtype=torch.bfloat16, width=6)
INDEX_KEY = KvComponent(name="index_key", dtype=torch.float32, width=5)
COMPONENTS: tuple[LayerComponents, ...] = ((LATENT, ROPE, INDEX_KEY), (LATENT, ROPE))
BLOCKS = 6


@dataclass
class Model:
    kv_components: Sequence[LayerComponents] = COMPONENTS


def test_kv_layout_names_every_component_of_every_layer() -> None:
    layout = kv_layout(Model(), 4, "print")
    assert (layout.model_fingerprint, layout.block_size) == ("print", 4)
    assert [
        [(part.name, part.dtype, part.row_bytes) for part in layer.components]
        for layer in layout.layers
    ] == [
        [("latent", "bfloat16", 40), ("rope", "bfloat16", 12), ("index_key", "float32", 20)],
        [("latent", "bfloat16", 40), ("rope", "bfloat16", 12)],
    ]


def test_kv_layout_of_another_dtype_is_a_named_mismatch() -> None:
    other = KvComponent(name="latent", dtype=torch.float16, width=20)
    theirs = kv_layout(Model(((other, ROPE, INDEX_KEY), COMPONENTS[1])), 4, "print")
    mismatches = compare(kv_layout(Model(), 4, "print"), theirs)
    assert [mismatch.field for mismatch in mismatches] == ["layers[0].latent.dtype"]


def test_source_region_addresses_are_those_of_the_tensors() -> None:
    cache = PagedKvCache.allocate(COMPONENTS, num_blocks=BLOCKS, block_size=4)
    places = placements(source_region(cache), kv_layout(Model(), 4, "print"))
    for (layer, component), place in places.items():
        tensor = cache.tensor(layer, component)
        for block, row in ((0, 0), (2, 3), (BLOCKS - 1, 1)):
            assert place.start_of(block * 4 + row) == tensor[block, row].data_ptr()


def test_target_region_offsets_count_from_the_base() -> None:
    target = LoopbackEngine().create_target(
        target_size_bytes(COMPONENTS, num_blocks=BLOCKS, block_size=4)
    )
    cache = cache_over_target(target, COMPONENTS, num_blocks=BLOCKS, block_size=4)
    region = target_region_map(cache, target.address)
    assert region.size_bytes == target.descriptor.size_bytes
    places = placements(region, kv_layout(Model(), 4, "print"))
    for (layer, component), place in places.items():
        tensor = cache.tensor(layer, component)
        assert place.start_of(5) == tensor[1, 1].data_ptr() - target.address


def test_cache_over_target_too_small_is_refused() -> None:
    size = target_size_bytes(COMPONENTS, num_blocks=BLOCKS, block_size=4)
    target = LoopbackEngine().create_target(size - 1)
    with pytest.raises(AttentionConfigError, match="buffer"):
        cache_over_target(target, COMPONENTS, num_blocks=BLOCKS, block_size=4)


def test_cache_over_target_outlives_the_close_of_the_target(tmp_path: Path) -> None:
    size = target_size_bytes(COMPONENTS, num_blocks=BLOCKS, block_size=4)
    target = ShmEngine(tmp_path / "kv").create_target(size)
    cache = cache_over_target(target, COMPONENTS, num_blocks=BLOCKS, block_size=4)
    cache.tensor(0, "latent").fill_(3)
    target.close()
    del target
    assert bool((cache.tensor(0, "latent") == 3).all())


@pytest.mark.parametrize("name", ["loopback", "shm"])
@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (2, 4), (4, 2)])
def test_push_between_caches_moves_the_granted_rows_and_no_other(
    name: str, source_size: int, target_size: int, tmp_path: Path
) -> None:
    engine: TransferEngine = LoopbackEngine() if name == "loopback" else ShmEngine(tmp_path / "kv")
    generator = torch.Generator().manual_seed(3)
    source = PagedKvCache.allocate(
        COMPONENTS, num_blocks=BLOCKS * 4 // source_size, block_size=source_size
    )
    num_target_blocks = BLOCKS * 4 // target_size
    target = engine.create_target(
        target_size_bytes(COMPONENTS, num_blocks=num_target_blocks, block_size=target_size)
    )
    cache = cache_over_target(
        target, COMPONENTS, num_blocks=num_target_blocks, block_size=target_size
    )
    for layer, components in enumerate(COMPONENTS):
        for component in components:
            tensor = source.tensor(layer, component.name)
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    link = engine.connect(target.descriptor, "prefill-1", 2.0)
    pipeline = PushPipeline(
        link=link,
        source=source_region(source),
        target=target_region_map(cache, target.address),
        layout=kv_layout(Model(), source_size, "print"),
        num_threads=0,
        target_block_size=target_size,
    )
    source_blocks = tuple(reversed(range(12 // source_size)))
    target_blocks = tuple(range(num_target_blocks - 12 // target_size, num_target_blocks))
    rows = RowRange(1, 11)
    receipts: list[Receipt] = []
    ticket = TicketIssuer("d").issue(
        prefill_incarnation="prefill-1", block_ids=target_blocks, rows=rows, lease_s=60.0
    )
    job = PushJob(
        ticket=ticket,
        source_block_ids=source_blocks,
        on_receipt=receipts.append,
        on_failure=lambda failure: pytest.fail(str(failure)),
    )
    pipeline.open(job)
    for layer in range(2):
        pipeline.submit(job, layer=layer, rows=rows, chunk=0, event=FakeEvent())
    while pipeline.run_once():
        pass
    assert len(receipts) == 5
    for layer, components in enumerate(COMPONENTS):
        for component in components:
            sent = source.tensor(layer, component.name)[list(source_blocks)].flatten(0, 1)
            landed = cache.tensor(layer, component.name)
            found = landed[list(target_blocks)].flatten(0, 1)
            assert torch.equal(found[1:11], sent[1:11])
            assert landed.count_nonzero() == found[1:11].count_nonzero()
    assert pipeline.close(1.0)
    link.close()
    target.close()
