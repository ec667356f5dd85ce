"""Which request a row belongs to and how much it sees, from a plan's tensors alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.plan import AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRows:
    """The rows of a step that are queries; padding rows lie behind them.

    Attributes:
        num_rows: N, rows that belong to a request.
        request: int64 [N], index of the row's request.
        num_visible: int64 [N], keys the row may see, the first ones of its request; 0 if none.
    """

    num_rows: int
    request: Tensor
    num_visible: Tensor


def query_rows(plan: AttentionPlan) -> QueryRows:
    """Read the rows off the plan's tensors (a replayed step has stale host lengths)."""
    ends = plan.cum_query_lens
    num_rows = int(ends[-1]) if plan.num_requests else 0
    row = torch.arange(num_rows)
    # right=True steps over requests without queries: their end is not past any row of theirs.
    request = torch.searchsorted(ends, row, right=True)
    offset = (plan.key_lens - ends).index_select(0, request)  # key_len - query_len - first row
    return QueryRows(
        num_rows=num_rows,
        request=request,
        num_visible=(row + (offset + 1)).clamp_(min=0),
    )
