"""The set of reported rows, against a set of integers."""

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.row_cover import RowCover
from kv_transfer.spans import RowRange

RANGES = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(
    lambda pair: RowRange(pair[0], pair[0] + pair[1])
)


@given(st.lists(RANGES, max_size=25))
def test_row_cover_any_order_refuses_doubles_and_holds_the_rest(added: list[RowRange]) -> None:
    cover, model = RowCover(), set[int]()
    for rows in added:
        new = set(range(rows.start, rows.end))
        assert cover.add(rows) == model.isdisjoint(new)
        if model.isdisjoint(new):
            model |= new
        held = [row for part in cover.ranges() for row in range(part.start, part.end)]
        assert held == sorted(model)
    for one, following in zip(cover.ranges(), cover.ranges()[1:], strict=False):
        assert one.end < following.start, "adjoining ranges are merged"
