"""Used ticket ids stay refused as long as a Grant could carry them."""

import pytest

from prefill_service.scheduler import JobId
from prefill_service.ticket_book import TicketBook
from serving_core.errors import OverloadedError

KEEP_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TicketBook:
    return TicketBook(keep_s=KEEP_S, max_graves=2, clock=clock)


def test_bound_ticket_is_used_until_long_after_its_job(book: TicketBook, clock: Clock) -> None:
    assert not book.is_used(b"a")
    book.bind(b"a", JobId(1))
    assert book.is_used(b"a")
    assert book.live_job(b"a") == 1
    book.bury_live(b"a")
    assert book.live_job(b"a") is None
    clock.now_s += KEEP_S - 1
    assert book.is_used(b"a")
    clock.now_s += 1
    assert not book.is_used(b"a")


def test_unknown_ticket_is_used_once_it_is_buried(book: TicketBook) -> None:
    book.bury_unknown(b"a")
    book.bury_unknown(b"a")
    assert book.is_used(b"a")
    assert book.live_job(b"a") is None


def test_too_many_unknown_tickets_are_refused_and_none_is_forgotten(
    book: TicketBook, clock: Clock
) -> None:
    book.bury_unknown(b"a")
    clock.now_s += 1
    book.bury_unknown(b"b")
    with pytest.raises(OverloadedError, match="2 revoked tickets"):
        book.bury_unknown(b"c")
    assert book.is_used(b"a")
    assert book.is_used(b"b")
    clock.now_s += KEEP_S - 1
    book.bury_unknown(b"c")
    assert not book.is_used(b"a")
    assert book.is_used(b"c")


def test_live_ticket_can_be_buried_when_the_graves_are_full(book: TicketBook) -> None:
    book.bind(b"live", JobId(1))
    book.bury_unknown(b"a")
    book.bury_unknown(b"b")
    book.bury_live(b"live")
    assert all(book.is_used(ticket_id) for ticket_id in (b"live", b"a", b"b"))
