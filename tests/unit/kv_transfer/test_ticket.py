"""Tickets are bound to both incarnations and to every field."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import LayoutError, StaleTicketError, TicketMacError
from kv_transfer.spans import RowRange
from kv_transfer.ticket import MAC_BYTES, TICKET_ID_BYTES, Ticket, TicketIssuer


def issue(issuer: TicketIssuer, **fields: object) -> Ticket:
    values = {
        "prefill_incarnation": "p1",
        "block_ids": (3, 1, 4),
        "rows": RowRange(0, 10),
        "lease_s": 5.0,
        "slots": (3, 2),
    }
    return issuer.issue(**(values | fields))  # type: ignore[arg-type]


def test_issued_ticket_verifies_until_it_is_retired() -> None:
    issuer = TicketIssuer("d1")
    ticket = issue(issuer)
    assert len(ticket.id) == TICKET_ID_BYTES
    assert len(ticket.mac) == MAC_BYTES
    issuer.verify(ticket.id, ticket.mac)
    issuer.verify_ticket(ticket)
    issuer.retire(ticket.id)
    issuer.retire(ticket.id)
    with pytest.raises(StaleTicketError):
        issuer.verify(ticket.id, ticket.mac)
    with pytest.raises(StaleTicketError):
        issuer.verify_ticket(ticket)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decode_incarnation", "d2"),
        ("prefill_incarnation", "p2"),
        ("block_ids", (3, 1, 5)),
        ("block_ids", (3, 1)),
        ("rows", RowRange(0, 11)),
        ("rows", RowRange(1, 10)),
        ("lease_s", 6.0),
        ("slots", (2,)),
        ("slots", (2, 3)),
        ("slots", ()),
        ("mac", bytes(MAC_BYTES)),
        ("mac", b""),
    ],
)
def test_ticket_with_any_field_changed_is_refused(field: str, value: object) -> None:
    issuer = TicketIssuer("d1")
    with pytest.raises(TicketMacError):
        issuer.verify_ticket(replace(issue(issuer), **{field: value}))


def test_block_moved_to_the_slots_changes_the_code() -> None:
    issuer = TicketIssuer("d1")
    ticket = issue(issuer, block_ids=(3, 1, 4), slots=(7,))
    with pytest.raises(TicketMacError):
        issuer.verify_ticket(replace(ticket, block_ids=(3, 1), slots=(4, 7)))


def test_ticket_of_the_previous_incarnation_is_stale() -> None:
    ticket = issue(TicketIssuer("d1"))
    with pytest.raises(StaleTicketError):
        TicketIssuer("d1").verify(ticket.id, ticket.mac)


def test_ticket_codes_of_two_issuers_differ() -> None:
    one, other = TicketIssuer("d1"), TicketIssuer("d1")
    assert one._key != other._key


def test_mac_of_another_live_ticket_is_refused() -> None:
    issuer = TicketIssuer("d1")
    first, second = issue(issuer), issue(issuer)
    assert first.id != second.id
    with pytest.raises(TicketMacError):
        issuer.verify(first.id, second.mac)


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_encoding_keeps_neighbouring_names_apart(a: str, b: str, c: str, d: str) -> None:
    issuer = TicketIssuer("d")
    base = issue(issuer)
    one = issuer._mac_of(replace(base, decode_incarnation=a, prefill_incarnation=b))
    other = issuer._mac_of(replace(base, decode_incarnation=c, prefill_incarnation=d))
    assert (one == other) == ((a, b) == (c, d))


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
def test_issue_lease_that_is_no_time_is_refused(lease_s: float) -> None:
    with pytest.raises(LayoutError, match="lease_s"):
        issue(TicketIssuer("d1"), lease_s=lease_s)


def test_ticket_printed_hides_its_code() -> None:
    ticket = issue(TicketIssuer("d1"))
    assert str(ticket.mac) not in repr(ticket)
    assert "mac" not in repr(ticket)
