"""Both ends of a push in one process, stepped by hand: nothing moves unless a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.engine.base import CopySpan, WriterLink
from kv_transfer.engine.loopback import LoopbackEngine
from kv_transfer.receiver import ReceiverLimits, Reservation, ReservationTable
from kv_transfer.sender import PushFailure, PushJob, PushLimits, PushPipeline
from kv_transfer.spans import RowRange
from kv_transfer.ticket import Receipt, Ticket, TicketIssuer
from tests.support.kv_pools import PoolView, SourcePool, make_layout, make_region

PREFILL = "prefill-1"
PEER = "prefill.example:1"
LEASE_S = 10.0


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        """Start at an arbitrary time."""
        self.now_s = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


class FakeEvent:
    """An event that completes, or fails, when told to."""

    def __init__(self, *, is_complete: bool = True) -> None:
        """Make it."""
        self._complete = threading.Event()
        self.error: Exception | None = None
        if is_complete:
            self.complete()

    def complete(self) -> None:
        """Let waiters go on."""
        self._complete.set()

    def synchronize(self, timeout_s: float) -> bool:
        """As the protocol says."""
        if self.error is not None:
            raise self.error
        return self._complete.wait(timeout_s)


class HookedLink:
    """A link that lets a test act right before a write, and replace its outcome."""

    def __init__(self, link: WriterLink) -> None:
        """Wrap a real link."""
        self._link = link
        self.before_write: Callable[[Sequence[CopySpan]], None] = lambda copies: None
        self.before_check: Callable[[], None] = lambda: None

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """As the real link."""
        self.before_write(copies)

        def hooked() -> bool:
            self.before_check()
            return should_stop()

        return self._link.write(copies, hooked)

    def peer_is_dead(self) -> bool:
        """As the real link."""
        return self._link.peer_is_dead()

    def proves_quiet(self) -> bool:
        """As the real link."""
        return self._link.proves_quiet()

    def close(self) -> None:
        """As the real link."""
        self._link.close()


@dataclass(eq=False)
class PushLog:
    """What a job's callbacks were told."""

    receipts: list[Receipt] = field(default_factory=list)
    failures: list[PushFailure] = field(default_factory=list)
    num_done: int = 0

    def done(self) -> None:
        """Count."""
        self.num_done += 1

    def job(self, ticket: Ticket, source_block_ids: Sequence[int]) -> PushJob:
        """A job that reports here."""
        return PushJob(
            ticket=ticket,
            source_block_ids=tuple(source_block_ids),
            on_receipt=self.receipts.append,
            on_failure=self.failures.append,
            on_done=self.done,
        )


class PushPair:
    """A source pool, a target, the pipeline between them and the table on the other side."""

    def __init__(
        self,
        *,
        source_block_size: int = 4,
        target_block_size: int = 4,
        num_blocks: int = 12,
        num_layers: int = 2,
        limits: PushLimits | None = None,
        max_quarantined_blocks: int = 6,
    ) -> None:
        """Build both sides."""
        self.clock = FakeClock()
        self.layout = make_layout(block_size=source_block_size, num_layers=num_layers)
        self.source = SourcePool(self.layout, num_blocks=num_blocks, padding_bytes=5)
        target_layout = make_layout(block_size=target_block_size, num_layers=num_layers)
        region = make_region(target_layout, num_blocks=num_blocks)
        self.engine = LoopbackEngine()
        self.target = self.engine.create_target(region.size_bytes)
        self.view = PoolView(self.target.buffer, region, target_layout)
        self._target_layout, self._target_region = target_layout, region
        self._limits = limits
        self.restart_writer(PREFILL)
        self.issuer = TicketIssuer("decode-1")
        self._max_quarantined_blocks = max_quarantined_blocks
        self.table = self.make_table(self.target.buffer)

    def restart_writer(self, incarnation: str) -> None:
        """Connect as a new prefill process, with a pipeline that knows nothing of the old one."""
        self.link = HookedLink(self.engine.connect(self.target.descriptor, incarnation, 1.0))
        self.pipeline = PushPipeline(
            link=self.link,
            source=self.source.region,
            target=self._target_region,
            layout=self.layout,
            clock=self.clock,
            num_threads=0,
            target_block_size=self._target_layout.block_size,
            limits=self._limits,
        )

    def make_table(self, memory: memoryview) -> ReservationTable:
        """A table over some memory."""
        return ReservationTable(
            issuer=self.issuer,
            layout=self._target_layout,
            region=self._target_region,
            memory=memory,
            clock=self.clock,
            limits=ReceiverLimits(
                max_quarantined_blocks_per_peer=self._max_quarantined_blocks,
                drain_timeout_s=2.0,
                probe_interval_s=1.0,
            ),
        )

    def reserve(
        self, block_ids: Sequence[int], rows: RowRange, *, prefill_incarnation: str = PREFILL
    ) -> Reservation:
        """Issue a ticket and enter it."""
        ticket = self.issuer.issue(
            prefill_incarnation=prefill_incarnation,
            block_ids=tuple(block_ids),
            rows=rows,
            lease_s=LEASE_S,
        )
        return self.table.reserve(ticket, peer=PEER)

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
