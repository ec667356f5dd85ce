"""The KV pool of this service: memory that prefill services write into and the model reads."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from attention_core.paged_kv import PagedKvCache
from kv_transfer.engine.base import TargetMemory, TransferEngine
from kv_transfer.layout import KvLayout, RegionMap
from kv_transfer.receiver import ReceiverLimits, ReservationTable
from kv_transfer.ticket import TicketIssuer
from serving_core.block_pool import BlockPool
from serving_core.config import DecodeConfig
from serving_core.kv_regions import (
    cache_over_target,
    kv_layout,
    pool_memory,
    target_region_map,
    target_size_bytes,
)
from serving_core.model.transformer import CausalLM

EngineFactory = Callable[[DecodeConfig], TransferEngine]

_DEFAULT_QUARANTINE_SHARE = 4  # a peer may hold at most one of so many blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """The memory, what lies where in it, and who may write to it.

    Attributes:
        decode_incarnation: New at each start of this process.
        engine: How rows come.
        target: The pool's memory where rows are written straight into blocks; None where they come
            through staging rings.
        cache: The pool as tensors.
        layout: What the rows look like.
        region: Where they lie.
        pool: Which blocks are free.
        issuer: Makes tickets.
        table: Reservations of blocks for prefill services.
        max_quarantined_blocks: Most blocks that writers of one peer may hold after a fault.
    """

    decode_incarnation: str
    engine: TransferEngine
    target: TargetMemory | None
    cache: PagedKvCache
    layout: KvLayout
    region: RegionMap
    pool: BlockPool
    issuer: TicketIssuer
    table: ReservationTable
    max_quarantined_blocks: int


def make_kv_memory(
    config: DecodeConfig,
    model: CausalLM,
    engine: TransferEngine,
    *,
    clock: Callable[[], float],
) -> KvMemory:
    """Allocate the pool's memory, all of it now.

    Raises:
        TargetAllocationError: It cannot be had.
    """
    sizes = {"num_blocks": config.num_kv_blocks, "block_size": config.block_size}
    target: TargetMemory | None = None
    if engine.can_fence_writer:
        target = engine.create_target(target_size_bytes(model.kv_components, **sizes))
        cache = cache_over_target(target, model.kv_components, **sizes)
        memory, address = target.buffer, target.address
    else:
        cache = PagedKvCache.allocate(
            model.kv_components, num_blocks=config.num_kv_blocks, block_size=config.block_size
        )
        memory, address = pool_memory(cache).view, pool_memory(cache).address
    layout = kv_layout(model, config.block_size, model.fingerprint)
    region = target_region_map(cache, address)
    incarnation = f"decode-{secrets.token_hex(8)}"
    issuer = TicketIssuer(incarnation)
    max_quarantined_blocks = config.quarantine_cap_blocks or max(
        1, config.num_kv_blocks // _DEFAULT_QUARANTINE_SHARE
    )
    table = ReservationTable(
        issuer=issuer,
        layout=layout,
        region=region,
        memory=memory,
        clock=clock,
        limits=ReceiverLimits(
            max_quarantined_blocks_per_peer=max_quarantined_blocks,
            drain_timeout_s=config.revoke_timeout_s,
            probe_interval_s=config.reap_interval_s,
        ),
    )
    return KvMemory(
        decode_incarnation=incarnation,
        engine=engine,
        target=target,
        cache=cache,
        layout=layout,
        region=region,
        pool=BlockPool(config.num_kv_blocks),
        issuer=issuer,
        table=table,
        max_quarantined_blocks=max_quarantined_blocks,
    )
