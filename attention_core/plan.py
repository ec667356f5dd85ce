"""The plan of one step: which rows of which requests are computed, and where their KV lies.

A plan is built from plain ints once per step and shared by all layers. Its tensors are never
replaced; a captured step refreshes them in place with :meth:`AttentionPlan.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.errors import AttentionConfigError
from attention_core.rope import RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan:
    """The part of one request that a step computes.

    Attributes:
        num_queries: Tokens computed in this step; 0 is allowed and computes nothing.
        num_computed: Tokens whose KV is in the cache already; the span's positions are
            num_computed .. num_computed + num_queries - 1.
        block_ids: Blocks of the request in order; covers num_computed + num_queries tokens at
            least. Blocks past those are not read.
    """

    num_queries: int
    num_computed: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLens:
    """Lengths as ints, for operators that take host lists; padding requests count 0.

    Attributes:
        query_lens: B ints, tokens of each request in this step.
        key_lens: B ints, tokens of each request after this step.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Metadata of one step. Letters: shape.py.

    Request b owns rows [cum_query_lens[b-1], cum_query_lens[b]). Its query i (0-based) may see
    key j iff j <= key_lens[b] - query_len[b] + i ("right-down causal"). Rows from
    cum_query_lens[-1] on are padding: slot -1, position 0, no key visible.

    Attributes:
        cum_query_lens: int32 [B], running sum of query lengths, no leading 0.
        key_lens: int32 [B], plain lengths; 0 for a padding request.
        block_table: int32 [B, M], block of logical positions [m*bs, (m+1)*bs); entries past
            ceil(key_len / bs) have no meaning and are not read.
        slot_mapping: int64 [T], cache row block*bs + offset that each token is written to; -1 =
            drop.
        positions: int64 [T].
        cos: fp32 [T, R], rows of the rope table at positions.
        sin: fp32 [T, R].
        host: The lengths as ints. A captured step does not refresh them: an operator that reads
            them cannot be replayed without a task update.
        block_size: bs.
    """

    cum_query_lens: Tensor
    key_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    host: HostLens
    block_size: int

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def num_requests(self) -> int:
        """B, padding included."""
        return self.cum_query_lens.shape[0]

    def load(self, source: AttentionPlan) -> None:
        """Copy another plan's tensors into this plan's, whose addresses stay.

        Raises:
            AttentionConfigError: A size differs: pad the source to this plan's sizes.
        """
        if source.block_size != self.block_size:
            raise AttentionConfigError("block_size", source.block_size, self.block_size)
        pairs: list[tuple[Tensor, Tensor]] = []
        for field in _TENSOR_FIELDS:
            mine: Tensor = getattr(self, field)
            theirs: Tensor = getattr(source, field)
            if mine.shape != theirs.shape:
                raise AttentionConfigError(field, tuple(theirs.shape), tuple(mine.shape))
            pairs.append((mine, theirs))
        # Copy only what fits as a whole: half a plan would point at another step's blocks.
        for mine, theirs in pairs:
            mine.copy_(theirs, non_blocking=True)


_TENSOR_FIELDS = (
    "cum_query_lens",
    "key_lens",
    "block_table",
    "slot_mapping",
    "positions",
    "cos",
    "sin",
)


def build_plan(
    spans: Sequence[QuerySpan],
    *,
    block_size: int,
    rope: RopeTable,
    num_padded_tokens: int | None = None,
    num_padded_requests: int | None = None,
    max_blocks: int | None = None,
) -> AttentionPlan:
    """Lay the spans out in rows.

    Args:
        spans: Requests of the step, in row order.
        block_size: bs.
        rope: Table that covers every position; the plan lives on its device.
        num_padded_tokens: T; None for no padding.
        num_padded_requests: B; None for no padding.
        max_blocks: M; None for what the longest request needs.

    Raises:
        AttentionConfigError: A span is impossible (named by its index), or does not fit the
            padded sizes.
    """
    if block_size < 1:
        raise AttentionConfigError("block_size", block_size, "at least 1")
    key_lens, blocks = _check_spans(spans, block_size, rope.max_positions)
    query_lens = [span.num_queries for span in spans]
    num_tokens = _padded("num_padded_tokens", num_padded_tokens, sum(query_lens))
    num_requests = _padded("num_padded_requests", num_padded_requests, len(spans))
    num_columns = _padded("max_blocks", max_blocks, max(blocks, default=0))
    padding = (0,) * (num_requests - len(spans))
    host = HostLens(query_lens=(*query_lens, *padding), key_lens=(*key_lens, *padding))
    block_table = _block_table(spans, blocks, num_requests, num_columns)
    positions, slots = _rows(spans, block_table, block_size, num_tokens)
    device = rope.cos.device
    positions = positions.to(device)
    return AttentionPlan(
        cum_query_lens=torch.tensor(host.query_lens, dtype=torch.int64)
        .cumsum(0)
        .to(device=device, dtype=torch.int32),
        key_lens=torch.tensor(host.key_lens, dtype=torch.int32, device=device),
        block_table=block_table.to(device=device, dtype=torch.int32),
        slot_mapping=slots.to(device),
        positions=positions,
        cos=rope.cos.index_select(0, positions),
        sin=rope.sin.index_select(0, positions),
        host=host,
        block_size=block_size,
    )


def _check_spans(
    spans: Sequence[QuerySpan], block_size: int, max_positions: int
) -> tuple[list[int], list[int]]:
    """Length of every request after the step, and the blocks that takes."""
    key_lens: list[int] = []
    blocks: list[int] = []
    for index, span in enumerate(spans):
        if span.num_queries < 0:
            raise AttentionConfigError(
                f"spans[{index}].num_queries", span.num_queries, "at least 0"
            )
        if span.num_computed < 0:
            raise AttentionConfigError(
                f"spans[{index}].num_computed", span.num_computed, "at least 0"
            )
        length = span.num_computed + span.num_queries
        if length > max_positions:
            raise AttentionConfigError(
                f"spans[{index}] length", length, f"at most {max_positions} positions"
            )
        needed = -(-length // block_size)
        if len(span.block_ids) < needed:
            raise AttentionConfigError(
                f"spans[{index}].block_ids",
                f"{len(span.block_ids)} blocks",
                f"at least {needed} blocks of {block_size} for {length} tokens",
            )
        key_lens.append(length)
        blocks.append(needed)
    return key_lens, blocks


def _padded(field: str, padded: int | None, needed: int) -> int:
    if padded is None:
        return needed
    if padded < needed:
        raise AttentionConfigError(field, padded, f"at least {needed}")
    return padded


def _block_table(
    spans: Sequence[QuerySpan], blocks: Sequence[int], num_requests: int, num_columns: int
) -> Tensor:
    """int64 [B, M], 0 where nothing is."""
    table = torch.zeros((num_requests, num_columns), dtype=torch.int64)
    used = [
        block_id
        for span, needed in zip(spans, blocks, strict=True)
        for block_id in span.block_ids[:needed]
    ]
    if used:
        # One flat copy instead of one per request: a decode step has many short rows.
        is_used = torch.arange(num_columns) < torch.tensor(blocks)[:, None]
        table[: len(spans)][is_used] = torch.tensor(used)
    return table


def _rows(
    spans: Sequence[QuerySpan], block_table: Tensor, block_size: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Positions and slots, int64 [T] each; 0 and -1 in padding rows."""
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    query_lens = torch.tensor([span.num_queries for span in spans], dtype=torch.int64)
    ends = query_lens.cumsum(0)
    computed = torch.tensor([span.num_computed for span in spans], dtype=torch.int64)
    request = torch.repeat_interleave(torch.arange(len(spans)), query_lens)  # [real tokens]
    num_real = request.shape[0]
    if num_real:
        row = torch.arange(num_real)
        real = row + (computed - ends + query_lens).index_select(0, request)
        block = block_table[request, real // block_size]
        positions[:num_real] = real
        slots[:num_real] = block * block_size + real % block_size
    return positions, slots
