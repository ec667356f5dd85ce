"""Random hand-offs with random faults over both real sides; the invariants hold after every step.

The model is a pool of decode blocks in which a block that nobody owns holds a canary. Blocks are
reused as soon as the table releases them, and source blocks are overwritten as soon as the sender
says that it is done with them, so a late write (I1, I14) or a late read (I5) is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.engine.base import WriterState
from kv_transfer.errors import (
    DigestMismatchError,
    IncompleteError,
    PushRefusedError,
    ReceiptOverlapError,
    StaleTicketError,
    TicketError,
    TicketMacError,
    WriteFaultError,
)
from kv_transfer.push_job import PushJob
from kv_transfer.receiver import ReapKind, Released, Reservation
from kv_transfer.session import ReservationState
from kv_transfer.spans import RowRange
from kv_transfer.ticket import MAC_BYTES, Receipt
from tests.support.push_pair import LEASE_S, FakeEvent, PushLog, PushPair

BLOCK_SIZE = 2
NUM_BLOCKS = 8
NUM_LAYERS = 2
CANARY = "canary"
ACTIVE = (ReservationState.RESERVED, ReservationState.RECEIVING)


@dataclass(eq=False, kw_only=True)
class Handoff:
    """One hand-off as the model sees it."""

    tag: str
    reservation: Reservation
    job: PushJob
    log: PushLog
    next_row: int
    num_chunks: int = 0
    open_events: list[FakeEvent] = field(default_factory=list)
    num_delivered: int = 0
    accepted: list[Receipt] = field(default_factory=list)
    is_corrupt: bool = False
    quiet: Future[None] | None = None
    words_at_quiet: tuple[int, int, int] | None = None

    @property
    def rows(self) -> RowRange:
        return self.job.ticket.rows

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.job.ticket.block_ids

    @property
    def words(self) -> tuple[int, int, int]:
        return len(self.log.receipts), len(self.log.failures), self.log.num_done

    @property
    def sender_has_ended(self) -> bool:
        is_quiet = self.quiet is not None and self.quiet.done()
        return is_quiet or bool(self.log.failures) or self.log.num_done > 0


PICK = st.integers(0, 11)
RARELY = st.integers(0, 15).map(lambda number: number == 11)
SOMETIMES = st.integers(0, 3).map(lambda number: number == 2)


def some(
    predicate: Callable[[Handoff], bool],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a rule's first argument one of the hand-offs for which the predicate holds.

    The rule takes `pick`, and is not chosen while there is none.
    """

    def decorate(step: Callable[..., None]) -> Callable[..., None]:
        def run(self: HandoffMachine, pick: int, **arguments: object) -> None:
            candidates = [handoff for handoff in self.recent if predicate(handoff)]
            step(self, candidates[pick % len(candidates)], **arguments)

        run.__name__ = step.__name__
        run.__doc__ = step.__doc__
        return precondition(lambda self: any(map(predicate, self.recent)))(run)

    return decorate


def is_active(handoff: Handoff) -> bool:
    return handoff.reservation.state in ACTIVE


def is_committed(handoff: Handoff) -> bool:
    return handoff.reservation.state is ReservationState.COMMITTED


def is_revoked(handoff: Handoff) -> bool:
    return handoff.reservation.state in (
        ReservationState.REVOKING,
        ReservationState.QUARANTINED,
    )


def has_rows_left(handoff: Handoff) -> bool:
    return handoff.next_row < handoff.rows.end and not handoff.sender_has_ended


def has_mail(handoff: Handoff) -> bool:
    return handoff.num_delivered < len(handoff.log.receipts)


class HandoffMachine(RuleBasedStateMachine):
    """Decode and prefill, driven at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = PushPair(
            source_block_size=BLOCK_SIZE,
            target_block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_layers=NUM_LAYERS,
            max_quarantined_blocks=NUM_BLOCKS,
        )
        self.incarnation = 0
        self.free = set(range(NUM_BLOCKS))
        self.free_source = set(range(NUM_BLOCKS))
        self.live: list[Handoff] = []  # their blocks are not back
        self.pushing: list[Handoff] = []  # their source blocks are not back
        self.recent: list[Handoff] = []  # live ones and some that have ended
        self.num_started = 0
        self._fill_canary(range(NUM_BLOCKS))
        self.pair.restart_writer("prefill-0")

    # Rules of an honest hand-off.

    @precondition(lambda self: self.free and self.free_source)
    @rule(num_blocks=st.integers(1, 3), first=st.integers(0, 1), missing=st.booleans())
    def start(self, num_blocks: int, first: int, missing: bool) -> None:
        num_blocks = min(num_blocks, len(self.free), len(self.free_source))
        rows_end = num_blocks * BLOCK_SIZE - (missing and first == 0)
        self.num_started += 1
        tag = f"handoff-{self.num_started}"
        blocks = [self.free.pop() for _ in range(num_blocks)]
        source_blocks = tuple(self.free_source.pop() for _ in range(num_blocks))
        self.pair.source.view.fill(tag, source_blocks, num_blocks * BLOCK_SIZE)
        reservation = self.pair.reserve(
            blocks, RowRange(first, rows_end), prefill_incarnation=f"prefill-{self.incarnation}"
        )
        log = PushLog()
        job = log.job(reservation.ticket, source_blocks)
        self.pair.pipeline.open(job)
        handoff = Handoff(tag=tag, reservation=reservation, job=job, log=log, next_row=first)
        self.live.append(handoff)
        self.pushing.append(handoff)
        ended = [other for other in self.recent if other not in self.live]
        self.recent = [*ended[-3:], *self.live]

    @rule(pick=PICK, num_rows=st.integers(1, 6), is_late=RARELY)
    @some(has_rows_left)
    def submit_chunk(self, handoff: Handoff, num_rows: int, is_late: bool) -> None:
        self._submit(handoff, num_rows, is_late=is_late)

    def _submit(self, handoff: Handoff, num_rows: int, *, is_late: bool) -> None:
        rows = RowRange(handoff.next_row, min(handoff.next_row + num_rows, handoff.rows.end))
        for layer in range(NUM_LAYERS):
            event = FakeEvent(is_complete=not is_late)
            is_taken = self.pair.pipeline.submit(
                handoff.job, layer=layer, rows=rows, chunk=handoff.num_chunks, event=event
            )
            assert is_taken
            if is_late:
                handoff.open_events.append(event)
        handoff.next_row = rows.end
        handoff.num_chunks += 1
        if rows.end == handoff.rows.end:
            self.pair.pipeline.finish(handoff.job.ticket.id)
        self._settle()

    @precondition(lambda self: any(handoff.open_events for handoff in self.recent))
    @rule()
    def complete_all_events(self) -> None:
        for handoff in self.recent:
            for event in handoff.open_events:
                event.complete()
            handoff.open_events.clear()

    @rule(pick=PICK, flips_at=st.one_of(st.none(), st.integers(0, 29)))
    @some(is_active)
    def pushes_to_the_end(self, handoff: Handoff, flips_at: int | None) -> None:
        """Without it a random walk hardly ever comes to a commit."""
        if has_rows_left(handoff):
            self._submit(handoff, handoff.rows.end - handoff.next_row, is_late=False)
        self.complete_all_events()
        self.pair.pump()
        self._settle()
        if flips_at is not None:
            self._flip(handoff, flips_at)
        while has_mail(handoff):
            self._deliver(handoff)

    @rule(num_pieces=st.integers(1, 8))
    def pump(self, num_pieces: int) -> None:
        for _ in range(num_pieces):
            self.pair.pipeline.run_once()
        self._settle()

    @rule(pick=PICK, num_receipts=st.integers(1, 20))
    @some(has_mail)
    def deliver_receipts(self, handoff: Handoff, num_receipts: int) -> None:
        for _ in range(min(num_receipts, len(handoff.log.receipts) - handoff.num_delivered)):
            self._deliver(handoff)

    def _deliver(self, handoff: Handoff) -> None:
        receipt = handoff.log.receipts[handoff.num_delivered]
        handoff.num_delivered += 1
        if handoff.reservation.state not in ACTIVE:
            with pytest.raises(TicketError):
                handoff.reservation.accept(receipt)
            return
        self._accept(handoff, receipt)

    def _accept(self, handoff: Handoff, receipt: Receipt) -> None:
        try:
            handoff.reservation.accept(receipt)
        except DigestMismatchError:
            assert handoff.is_corrupt
            self._decode_gives_up(handoff)
        else:
            handoff.accepted.append(receipt)

    @rule(pick=PICK)
    @some(is_active)
    def commit(self, handoff: Handoff) -> None:
        ticket_id = handoff.job.ticket.id
        if not handoff.reservation.is_complete:
            with pytest.raises(IncompleteError):
                self.pair.table.commit(ticket_id)
            return
        self.pair.table.commit(ticket_id)
        assert self._holds(handoff), "I2: committed KV is what was computed"

    @rule(pick=PICK)
    @some(is_committed)
    def end_request(self, handoff: Handoff) -> None:
        assert self._holds(handoff)
        self._take_back(self.pair.table.close(handoff.job.ticket.id))

    @rule(pick=PICK)
    @some(is_active)
    def renew(self, handoff: Handoff) -> None:
        self.pair.table.renew(handoff.job.ticket.id)
        is_renewed = self.pair.pipeline.renew(handoff.job.ticket.id)
        assert not (is_renewed and handoff.sender_has_ended)

    # Rules of faults.

    @rule(pick=PICK, happens=RARELY)
    @some(has_mail)
    def receipt_is_lost(self, handoff: Handoff, happens: bool) -> None:
        handoff.num_delivered += happens

    @rule(pick=PICK)
    @some(lambda handoff: handoff.num_delivered > 0)
    def receipt_comes_twice(self, handoff: Handoff) -> None:
        receipt = handoff.log.receipts[handoff.num_delivered - 1]
        if handoff.reservation.state not in ACTIVE:
            with pytest.raises(TicketError):
                handoff.reservation.accept(receipt)
            return
        if receipt in handoff.accepted:
            num_missing_rows = handoff.reservation.num_missing_rows
            with pytest.raises(ReceiptOverlapError):
                handoff.reservation.accept(receipt)
            assert handoff.reservation.num_missing_rows == num_missing_rows
        else:  # its twin was lost
            self._accept(handoff, receipt)

    @rule(pick=PICK)
    @some(lambda handoff: bool(handoff.log.receipts))
    def receipt_is_forged(self, handoff: Handoff) -> None:
        forged = replace(handoff.log.receipts[-1], ticket_mac=bytes(MAC_BYTES))
        is_live = handoff.reservation.state in ACTIVE
        with pytest.raises(TicketMacError if is_live else StaleTicketError):
            handoff.reservation.accept(forged)

    @rule(pick=PICK)
    @some(lambda handoff: bool(handoff.log.receipts))
    def receipt_goes_to_another_handoff(self, handoff: Handoff) -> None:
        for other in self.recent:
            if other is not handoff:
                with pytest.raises(StaleTicketError):
                    other.reservation.accept(handoff.log.receipts[-1])

    def _flip(self, handoff: Handoff, where: int) -> None:
        """Flip a byte whose receipt is on its way; verified rows are local memory and trusted."""
        places = self.pair.view.places()
        layer, component = places[where % len(places)]
        row = handoff.rows.start + where // len(places) % len(handoff.rows)
        if is_active(handoff) and not any(
            _covers(receipt, layer, component, row)
            for receipt in handoff.log.receipts[: handoff.num_delivered]
        ):
            self.pair.view.row(layer, component, handoff.blocks, row)[0] ^= 1
            handoff.is_corrupt = True

    @rule(happens=SOMETIMES)
    def write_fails(self, happens: bool) -> None:
        if not happens:
            return

        def fail(copies: object) -> None:
            raise WriteFaultError("planned")

        self.pair.link.before_write = fail
        self.pair.pipeline.run_once()
        self.pair.link.before_write = lambda copies: None
        self._settle()

    @rule(pick=PICK, happens=SOMETIMES)
    @some(is_active)
    def decode_revokes(self, handoff: Handoff, happens: bool) -> None:
        if happens:
            self._decode_gives_up(handoff)

    @rule(pick=PICK)
    @some(lambda handoff: not is_active(handoff) and not is_committed(handoff))
    def revoke_arrives(self, handoff: Handoff) -> None:
        """At any time after decode gave up, perhaps never, perhaps twice."""
        self._revoke_at_sender(handoff)

    @rule(pick=PICK)
    @some(is_revoked)
    def revoke_arrives_during_a_write(self, handoff: Handoff) -> None:

        def revoke(copies: object) -> None:
            self._revoke_at_sender(handoff, settle=False)

        self.pair.link.before_write = revoke
        self.pair.pipeline.run_once()
        self.pair.link.before_write = lambda copies: None
        self._settle()

    @rule(pick=PICK)
    @some(lambda handoff: is_revoked(handoff) and handoff.sender_has_ended)
    def drained_arrives(self, handoff: Handoff) -> None:
        """The sender's word, which it gives only when it is quiet."""
        self._take_back(self.pair.table.drained(handoff.job.ticket.id))

    @rule(pick=PICK)
    @some(lambda handoff: handoff.sender_has_ended)
    def stale_ticket_is_granted_again(self, handoff: Handoff) -> None:
        """Tickets of an earlier incarnation are refused before they come to the pipeline."""
        if handoff.job.ticket.prefill_incarnation == f"prefill-{self.incarnation}":
            with pytest.raises(PushRefusedError):
                self.pair.pipeline.open(handoff.job)

    @rule(seconds=st.sampled_from([0.1] * 6 + [1.0] * 6 + [LEASE_S * 0.6, LEASE_S * 0.8, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.pair.clock.advance(seconds)
        for action in self.pair.table.reap(self.pair.clock()):
            if action.kind is ReapKind.REVOKE:
                self.pair.table.begin_revoke(action.ticket_id)
            elif action.kind is ReapKind.QUARANTINE:
                self.pair.table.quarantine(action.ticket_id)
        # I1: that time has passed has freed nothing, see the invariant on block ownership.

    @rule(happens=RARELY)
    def writer_is_killed_and_restarts(self, happens: bool) -> None:
        if not happens:
            return
        incarnation = f"prefill-{self.incarnation}"
        self.pair.engine.end_writer(incarnation)
        assert self.pair.target.writer_state(incarnation) is WriterState.DEAD
        for handoff in self.live:
            if handoff.reservation.state in ACTIVE:
                self.pair.table.begin_revoke(handoff.job.ticket.id)
        for released in self.pair.table.writer_dead(incarnation):
            self._take_back(released)
        for handoff in self.pushing:
            handoff.quiet = Future()
            handoff.quiet.set_result(None)
        self.incarnation += 1
        self.pair.restart_writer(f"prefill-{self.incarnation}")
        self._settle()

    # Invariants.

    @invariant()
    def blocks_are_owned_by_exactly_one(self) -> None:
        owned = [block for handoff in self.live for block in handoff.blocks]
        assert len(set(owned)) == len(owned)
        assert set(owned) | self.free == set(range(NUM_BLOCKS))
        assert self.free.isdisjoint(owned)
        assert len(self.pair.table) == len(self.live)

    @invariant()
    def free_blocks_are_never_written(self) -> None:
        for block in self.free:
            assert self.pair.view.holds(f"{CANARY}-{block}", (block,), range(BLOCK_SIZE))

    @invariant()
    def owned_blocks_are_written_inside_the_grant_only(self) -> None:
        for handoff in self.live:
            for row in range(len(handoff.blocks) * BLOCK_SIZE):
                if not handoff.rows.start <= row < handoff.rows.end:
                    block = handoff.blocks[row // BLOCK_SIZE]
                    tail = row % BLOCK_SIZE
                    assert self.pair.view.holds(
                        f"{CANARY}-{block}", (block,), range(tail, tail + 1)
                    )

    @invariant()
    def committed_kv_stays_as_it_was(self) -> None:
        for handoff in self.live:
            if handoff.reservation.state is ReservationState.COMMITTED:
                assert self._holds(handoff)

    @invariant()
    def sender_says_one_last_word(self) -> None:
        for handoff in self.live:
            assert len(handoff.log.failures) + handoff.log.num_done <= 1
            if handoff.log.num_done:
                num_rows = sum(len(receipt.rows) for receipt in handoff.log.receipts)
                assert num_rows == len(handoff.rows) * len(self.pair.view.places())
            if handoff.words_at_quiet is not None:
                assert handoff.words == handoff.words_at_quiet

    def teardown(self) -> None:
        """I3: when all is quiet everything is back."""
        for handoff in list(self.live):
            if handoff.reservation.state is ReservationState.COMMITTED:
                self._take_back(self.pair.table.close(handoff.job.ticket.id))
                continue
            if handoff.reservation.state in ACTIVE:
                self.pair.table.begin_revoke(handoff.job.ticket.id)
            self._revoke_at_sender(handoff)
            assert handoff.sender_has_ended
            self._take_back(self.pair.table.drained(handoff.job.ticket.id))
        for handoff in list(self.pushing):
            self._revoke_at_sender(handoff)
        self.free_blocks_are_never_written()
        assert self.free == self.free_source == set(range(NUM_BLOCKS))
        assert self.pair.pipeline.stats().num_open == 0
        assert len(self.pair.table) == 0
        assert not self.pair.issuer._live

    # What the services do.

    def _decode_gives_up(self, handoff: Handoff) -> None:
        self.pair.table.begin_revoke(handoff.job.ticket.id)

    def _revoke_at_sender(self, handoff: Handoff, *, settle: bool = True) -> None:
        future = self.pair.pipeline.revoke(handoff.job.ticket.id)
        if handoff.quiet is None:
            handoff.quiet = future
        if settle:
            self._settle()

    def _take_back(self, released: Released | None) -> None:
        """Give the blocks to nobody, at once, and let nobody's canary show a late write."""
        assert released is not None
        self.free |= set(released.block_ids)
        self._fill_canary(released.block_ids)
        self.live = [
            handoff for handoff in self.live if handoff.job.ticket.id != released.ticket_id
        ]

    def _settle(self) -> None:
        """Reuse the source blocks of every push that has ended: I5 lets the owner do so now."""
        for handoff in list(self.pushing):
            if handoff.sender_has_ended:
                handoff.words_at_quiet = handoff.words
                self.pushing.remove(handoff)
                blocks = handoff.job.source_block_ids
                self.pair.source.view.fill("reused", blocks, len(blocks) * BLOCK_SIZE)
                self.free_source |= set(blocks)

    def _fill_canary(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pair.view.fill(f"{CANARY}-{block}", (block,), BLOCK_SIZE)

    def _holds(self, handoff: Handoff) -> bool:
        rows = range(handoff.rows.start, handoff.rows.end)
        return self.pair.view.holds(handoff.tag, handoff.blocks, rows)


def _covers(receipt: Receipt, layer: int, component: str, row: int) -> bool:
    return (receipt.layer, receipt.component) == (
        layer,
        component,
    ) and receipt.rows.start <= row < receipt.rows.end


HandoffMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # two cores are shared with other suites
)
TestHandoffModel = HandoffMachine.TestCase
