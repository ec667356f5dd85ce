"""Exact top-k with a defined order: score descending, then position ascending."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_topk(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest scores of each row, the same on every run and machine.

    torch.topk takes any of several equal scores. Asked for one more than k, it shows whether a
    row has equal scores inside the choice or across the cut; only such rows are sorted in full.

    Args:
        scores: [N, S]; -inf marks what must not be chosen, and its order is undefined.
        k: At least 1.

    Returns:
        int64 [N, min(k, S)].
    """
    if scores.shape[1] <= k:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    values, order = scores.topk(k + 1, dim=-1)
    order = order[:, :k]
    tied = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] != -torch.inf)
    if tied.any():
        rows = tied.any(dim=-1).nonzero().squeeze(1)
        ranked = scores[rows].sort(dim=-1, descending=True, stable=True).indices
        order[rows] = ranked[:, :k]
    return order
