"""Plans against rows laid out one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_core.errors import AttentionConfigError
from attention_core.plan import AttentionPlan, QuerySpan, build_plan
from attention_core.rope import build_rope_table

ROPE = build_rope_table(4, 64, 100.0, None)


@st.composite
def span_lists(draw: st.DrawFn, block_size: int) -> list[QuerySpan]:
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        num_queries, num_computed = draw(st.integers(0, 9)), draw(st.integers(0, 20))
        needed = -(-(num_queries + num_computed) // block_size)
        count = needed + draw(st.integers(0, 2))
        block_ids = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
        spans.append(
            QuerySpan(num_queries=num_queries, num_computed=num_computed, block_ids=block_ids)
        )
    return spans


def expected_rows(spans: Sequence[QuerySpan], block_size: int) -> list[tuple[int, int]]:
    """(position, slot) of every token."""
    rows = []
    for span in spans:
        for position in range(span.num_computed, span.num_computed + span.num_queries):
            block_id = span.block_ids[position // block_size]
            rows.append((position, block_id * block_size + position % block_size))
    return rows


@given(data=st.data(), block_size=st.sampled_from([1, 3, 4, 16]))
@settings(deadline=None)
def test_build_plan_lays_out_every_token_and_pads(data: st.DataObject, block_size: int) -> None:
    spans = data.draw(span_lists(block_size))
    extra_tokens, extra_requests, extra_columns = (data.draw(st.integers(0, 3)) for _ in range(3))
    rows = expected_rows(spans, block_size)
    lengths = [span.num_computed + span.num_queries for span in spans]
    blocks = [-(-length // block_size) for length in lengths]
    plan = build_plan(
        spans,
        block_size=block_size,
        rope=ROPE,
        num_padded_tokens=len(rows) + extra_tokens,
        num_padded_requests=len(spans) + extra_requests,
        max_blocks=max(blocks, default=0) + extra_columns,
    )
    padded = rows + [(0, -1)] * extra_tokens
    assert plan.num_tokens == len(padded)
    assert plan.num_requests == len(spans) + extra_requests
    assert plan.positions.tolist() == [position for position, _ in padded]
    assert plan.slot_mapping.tolist() == [slot for _, slot in padded]
    ends = [sum(span.num_queries for span in spans[: i + 1]) for i in range(len(spans))]
    assert plan.cum_query_lens.tolist() == ends + [len(rows)] * extra_requests
    assert plan.key_lens.tolist() == lengths + [0] * extra_requests
    assert plan.host.key_lens == (*lengths, *[0] * extra_requests)
    queries = [span.num_queries for span in spans]
    assert plan.host.query_lens == (*queries, *[0] * extra_requests)
    width = plan.block_table.shape[1]
    table = [
        [*span.block_ids[:count], *[0] * (width - count)]
        for span, count in zip(spans, blocks, strict=True)
    ]
    assert plan.block_table.tolist() == table + [[0] * width] * extra_requests
    for token, (position, _) in enumerate(padded):
        assert torch.equal(plan.cos[token], ROPE.cos[position])
        assert torch.equal(plan.sin[token], ROPE.sin[position])


def test_build_plan_gives_the_operators_dtypes() -> None:
    plan = decode_plan([3, 4])
    assert plan.cum_query_lens.dtype == torch.int32
    assert plan.key_lens.dtype == torch.int32
    assert plan.block_table.dtype == torch.int32
    assert plan.slot_mapping.dtype == torch.int64
    assert plan.positions.dtype == torch.int64
    assert plan.cos.dtype == torch.float32


def decode_plan(
    num_computed: Sequence[int], *, size: int | None = None, max_blocks: int | None = None
) -> AttentionPlan:
    spans = [
        QuerySpan(num_queries=1, num_computed=count, block_ids=range(10 * i, 10 * i + 10))
        for i, count in enumerate(num_computed)
    ]
    return build_plan(
        spans,
        block_size=4,
        rope=ROPE,
        num_padded_tokens=size,
        num_padded_requests=size,
        max_blocks=max_blocks,
    )


def span(num_queries: int, num_computed: int, num_blocks: int) -> QuerySpan:
    return QuerySpan(
        num_queries=num_queries, num_computed=num_computed, block_ids=range(num_blocks)
    )


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("spans[1].num_queries", span(-1, 4, 9)),
        ("spans[1].num_computed", span(1, -1, 9)),
        ("spans[1].block_ids", span(1, 4, 1)),
        ("spans[1] length", span(1, 64, 99)),
    ],
)
def test_build_plan_with_an_impossible_span_names_it(field: str, bad: QuerySpan) -> None:
    with pytest.raises(AttentionConfigError) as caught:
        build_plan([span(1, 1, 1), bad], block_size=4, rope=ROPE)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("num_padded_tokens", {"num_padded_tokens": 4}),
        ("num_padded_requests", {"num_padded_requests": 1}),
        ("max_blocks", {"max_blocks": 1}),
    ],
)
def test_build_plan_that_does_not_fit_its_padding_names_the_size(
    field: str, sizes: dict[str, int]
) -> None:
    with pytest.raises(AttentionConfigError) as caught:
        build_plan([span(2, 0, 1), span(3, 4, 2)], block_size=4, rope=ROPE, **sizes)
    assert caught.value.field == field


def test_build_plan_with_blocks_of_no_rows_is_refused() -> None:
    with pytest.raises(AttentionConfigError, match="block_size"):
        build_plan([], block_size=0, rope=ROPE)


def test_load_copies_every_tensor_and_keeps_addresses() -> None:
    frozen = decode_plan([0], size=3, max_blocks=5)
    names = (
        "cum_query_lens",
        "key_lens",
        "block_table",
        "slot_mapping",
        "positions",
        "cos",
        "sin",
    )
    addresses = [getattr(frozen, name).data_ptr() for name in names]
    source = decode_plan([17, 6, 3], size=3, max_blocks=5)
    frozen.load(source)
    for name in names:
        assert torch.equal(getattr(frozen, name), getattr(source, name))
    assert [getattr(frozen, name).data_ptr() for name in names] == addresses


def test_load_of_another_size_names_it_and_changes_nothing() -> None:
    frozen = decode_plan([0], size=3, max_blocks=5)
    before = frozen.key_lens.clone()
    with pytest.raises(AttentionConfigError, match="cum_query_lens"):
        frozen.load(decode_plan([5, 6], size=2, max_blocks=5))
    with pytest.raises(AttentionConfigError, match="block_table"):
        frozen.load(decode_plan([5, 6], size=3, max_blocks=6))
    other_blocks = build_plan([], block_size=8, rope=ROPE)
    with pytest.raises(AttentionConfigError, match="block_size"):
        frozen.load(other_blocks)
    assert torch.equal(frozen.key_lens, before)
