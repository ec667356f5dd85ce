"""Chooses, once, how rows arrive: what the engine can do decides it."""

from collections.abc import Callable

from decode_service.block_queue import BlockQueue
from decode_service.direct_landing import DirectLanding, DirectLandings
from decode_service.kv_memory import KvMemory
from decode_service.landing import Landings
from decode_service.staged_landing import StagedLandings
from kv_transfer.layout import StagingMap
from serving_core.config import DecodeConfig
from serving_core.kv_regions import pool_memory
from serving_core.rpc import wire


def make_landings(
    config: DecodeConfig,
    memory: KvMemory,
    blocks: BlockQueue,
    *,
    on_quarantine: Callable[[], None],
    on_fence: Callable[[], None],
) -> Landings:
    """Return what makes the places of arrival.

    Args:
        config: The configuration.
        memory: The pool.
        blocks: Its line.
        on_quarantine: Called after each change of the number of quarantined blocks.
        on_fence: Called when a staging ring is fenced.

    Raises:
        LayoutError: A row does not fit a slot of a staging ring.
    """
    if memory.target is not None:
        landing = DirectLanding(
            region=wire.region_to_proto(memory.region, memory.target.descriptor),
            table=memory.table,
            blocks=blocks,
            memory=memory.target,
            revoke_timeout_s=config.revoke_timeout_s,
            reap_interval_s=config.reap_interval_s,
            on_quarantine=on_quarantine,
        )
        return DirectLandings(landing, memory.target)
    ring = StagingMap(
        num_blocks=config.num_kv_blocks,
        num_slots=config.kv_staging_bytes // config.kv_slot_bytes,
        slot_bytes=config.kv_slot_bytes,
    )
    return StagedLandings(
        engine=memory.engine,
        ring=ring,
        layout=memory.layout,
        pool=pool_memory(memory.cache),
        table=memory.table,
        blocks=blocks,
        max_waiting=config.max_queued_requests,
        on_fence=on_fence,
    )
