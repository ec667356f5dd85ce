"""Both ends of a push through a staging ring in one process, stepped by hand."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.landing import PoolMemory, StagedRows
from kv_transfer.layout import StagingMap
from kv_transfer.receiver import ReceiverLimits, Reservation, ReservationTable
from kv_transfer.sender import PushJob, PushLimits, PushPipeline
from kv_transfer.spans import RowRange
from kv_transfer.ticket import TicketIssuer
from tests.support.kv_pools import PoolView, SourcePool, make_layout, make_region
from tests.support.push_pair import LEASE_S, PEER, PREFILL, FakeClock, FakeEvent, HookedLink

ROW_BYTES = 40  # of a layer with all components, see kv_pools


class UnfencedEngine(LoopbackEngine):
    """The engine inside one process, as if it could not tell whether a write has ended.

    What it wrote is in `buffer` of the target whether or not it was closed, so a test can write
    there late, as Mooncake does.
    """

    can_fence_writer = False


class StagedPair:
    """A source pool, a ring, the pipeline between them, and the blocks behind the ring."""

    def __init__(
        self,
        *,
        source_block_size: int = 4,
        target_block_size: int = 4,
        num_blocks: int = 12,
        num_layers: int = 2,
        num_slots: int = 4,
        rows_per_slot: int = 5,
        limits: PushLimits | None = None,
    ) -> None:
        """Build both sides."""
        self.clock = FakeClock()
        self.layout = make_layout(block_size=source_block_size, num_layers=num_layers)
        self.source = SourcePool(self.layout, num_blocks=num_blocks, padding_bytes=5)
        self.target_layout = make_layout(block_size=target_block_size, num_layers=num_layers)
        self._region = make_region(self.target_layout, num_blocks=num_blocks, padding_bytes=3)
        self.pool = bytearray(self._region.size_bytes)
        self._anchor = (ctypes.c_char * len(self.pool)).from_buffer(self.pool)
        self.view = PoolView(memoryview(self.pool), self._region, self.target_layout)
        self.ring = StagingMap(
            num_blocks=num_blocks, num_slots=num_slots, slot_bytes=rows_per_slot * ROW_BYTES + 1
        )
        self.engine = UnfencedEngine()
        self.issuer = TicketIssuer("decode-1")
        self.table = ReservationTable(
            issuer=self.issuer,
            layout=self.target_layout,
            region=self._region,
            memory=memoryview(self.pool),
            clock=self.clock,
            limits=ReceiverLimits(
                max_quarantined_blocks_per_peer=num_blocks,
                drain_timeout_s=2.0,
                probe_interval_s=1.0,
            ),
        )
        self._limits = limits
        self.new_ring(PREFILL)

    def new_ring(self, incarnation: str) -> None:
        """Make a ring, and connect to it as a new prefill process."""
        self.target = self.engine.create_target(self.ring.size_bytes)
        self.rows = StagedRows(
            places=self.table.places,
            layout=self.target_layout,
            pool=PoolMemory(view=memoryview(self.pool), address=ctypes.addressof(self._anchor)),
            ring=self.ring,
            ring_memory=self.target.buffer,
        )
        self.link = HookedLink(self.engine.connect(self.target.descriptor, incarnation, 1.0))
        self.pipeline = self.make_pipeline(num_threads=0)

    def make_pipeline(self, *, num_threads: int) -> PushPipeline:
        """A pipeline into the ring; with threads it runs on real time."""
        clock = {"clock": self.clock} if num_threads == 0 else {}
        return PushPipeline(
            link=self.link,
            source=self.source.region,
            target=self.ring,
            layout=self.layout,
            num_threads=num_threads,
            target_block_size=self.target_layout.block_size,
            limits=self._limits,
            **clock,
        )

    def reserve(
        self,
        block_ids: Sequence[int],
        rows: RowRange,
        slots: Sequence[int],
        *,
        prefill_incarnation: str = PREFILL,
    ) -> Reservation:
        """Issue a ticket and enter it."""
        ticket = self.issuer.issue(
            prefill_incarnation=prefill_incarnation,
            block_ids=tuple(block_ids),
            rows=rows,
            lease_s=LEASE_S,
            slots=tuple(slots),
        )
        return self.table.reserve(ticket, peer=PEER, landing=self.rows)

    def submit_layers(self, job: PushJob, rows: RowRange, *, chunk: int = 0) -> None:
        """Submit the rows of all layers with complete events."""
        for layer in range(len(self.layout.layers)):
            assert self.pipeline.submit(job, layer=layer, rows=rows, chunk=chunk, event=FakeEvent())

    def pump(self) -> int:
        """Do all work that can be done now; returns how many pieces."""
        num_pieces = 0
        while self.pipeline.run_once():
            num_pieces += 1
        return num_pieces
