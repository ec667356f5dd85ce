"""Absorbed attention over chosen rows of paged latent KV. Letters: attention_core/shape.py."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_core.backends.cpu.rows import QueryRows, query_rows
from attention_core.plan import AttentionPlan


def sparse_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    indices: Tensor,
    *,
    plan: AttentionPlan,
    scale: float,
    budget: int,
) -> Tensor:
    """See Kernels.sparse_attention.

    Memory: queries are taken in runs of max(1, budget / (K * (L + R + 2 * H))), so a run's
    gathered rows, logits and probabilities together stay within
    max(budget, K * (L + R + 2 * H)) elements. Only chosen rows are gathered.
    """
    out = torch.zeros_like(q_latent)
    rows = query_rows(plan)
    if rows.num_rows == 0:
        return out
    latent = latent_cache.view(-1, latent_cache.shape[-1])
    rope = rope_cache.view(-1, rope_cache.shape[-1])
    # No entry from column num_visible on counts, so short contexts need few columns.
    width = min(indices.shape[1], int(rows.num_visible.max()))
    if width == 0:
        return out
    row_size = width * (latent.shape[1] + rope.shape[1] + 2 * q_latent.shape[1])
    step = max(1, budget // row_size)
    for first in range(0, rows.num_rows, step):
        run = slice(first, min(first + step, rows.num_rows))
        slots, is_valid = _chosen_slots(indices[run, :width], run, rows, plan)
        chosen_latent = _gather(latent, slots)  # [n, k, L]
        logits = torch.bmm(q_latent[run].float(), chosen_latent.transpose(1, 2))
        logits.baddbmm_(q_rope[run].float(), _gather(rope, slots).transpose(1, 2))
        logits.mul_(scale).masked_fill_(~is_valid[:, None, :], -torch.inf)  # [n, H, k]
        attended = torch.bmm(logits.softmax(dim=-1), chosen_latent)
        sees_nothing = ~is_valid.any(dim=-1)
        out[run] = attended.masked_fill_(sees_nothing[:, None, None], 0.0).to(out.dtype)
    return out


def _chosen_slots(
    indices: Tensor, run: slice, rows: QueryRows, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """Cache rows of a run's choices and which of them count, [n, k] each."""
    num_visible = rows.num_visible[run, None]
    is_valid = (indices < 0).cumsum(dim=-1) == 0  # the first -1 ends a row
    is_valid &= indices < num_visible
    is_valid &= torch.arange(indices.shape[1]) < num_visible
    # An entry that does not count reads a row that does: probability 0 times a row that was never
    # written could be NaN. A row without any is zeroed by the caller.
    stand_in = indices.masked_fill(~is_valid, -1).amax(dim=-1, keepdim=True).clamp_(min=0)
    position = torch.where(is_valid, indices, stand_in).long()
    blocks = plan.block_table.index_select(0, rows.request[run])
    block = blocks.gather(1, position // plan.block_size)
    # Where nothing counts even the first table entry may be meaningless.
    block = block.masked_fill(num_visible <= 0, 0)
    return block * plan.block_size + position % plan.block_size, is_valid


def _gather(rows: Tensor, slots: Tensor) -> Tensor:
    """fp32 [n, k, width]."""
    return rows.index_select(0, slots.flatten()).view(*slots.shape, -1).float()
