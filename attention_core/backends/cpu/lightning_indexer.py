"""Index scores and top-k over paged keys. Letters: attention_core/shape.py, tiles.py."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_core.backends.cpu.rows import query_rows
from attention_core.backends.cpu.tiles import Tile, score_tiles
from attention_core.backends.cpu.topk import exact_topk
from attention_core.plan import AttentionPlan


def lightning_indexer(
    q: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    plan: AttentionPlan,
    *,
    topk: int,
    budget: int,
) -> Tensor:
    """See Kernels.lightning_indexer; budget bounds a tile's elements (see tiles.py)."""
    indices = torch.full((q.shape[0], topk), -1, dtype=torch.int32)
    num_visible = query_rows(plan).num_visible
    tiles = score_tiles(
        plan.cum_query_lens.tolist(),
        plan.key_lens.tolist(),
        num_heads=q.shape[1],
        head_dim=q.shape[2],
        budget=budget,
    )
    for tile in tiles:
        rows = _tile_rows(tile)
        visible = num_visible[rows]
        scores = _score(q[rows], weights[rows], _tile_keys(key_cache, plan, tile))
        masked = torch.arange(tile.num_keys) >= visible[:, None]
        chosen = exact_topk(scores.masked_fill_(masked, -torch.inf), topk)
        chosen = chosen.masked_fill_(chosen >= visible[:, None], -1)
        indices[rows, : chosen.shape[1]] = chosen.to(torch.int32)
    return indices


def _tile_rows(tile: Tile) -> slice | Tensor:
    """Rows of the tile's queries, request by request."""
    first, count = tile.first_rows[0], tile.num_queries
    if all(row == first + g * count for g, row in enumerate(tile.first_rows)):
        return slice(first, first + len(tile.first_rows) * count)  # a view, not a gather
    return (torch.tensor(tile.first_rows)[:, None] + torch.arange(count)).flatten()


def _tile_keys(key_cache: Tensor, plan: AttentionPlan, tile: Tile) -> Tensor:
    """fp32 [G, S, Di]; rows past a shorter request's length are anything and get masked."""
    block_size, num_requests = plan.block_size, len(tile.requests)
    num_columns = -(-tile.num_keys // block_size)
    if num_requests == 1:
        blocks = plan.block_table[tile.requests[0], :num_columns]
    else:
        requests = torch.tensor(tile.requests)
        blocks = plan.block_table[:, :num_columns].index_select(0, requests)
        key_lens = plan.key_lens.index_select(0, requests)
        # Entries past a request's last block may hold anything, such as no block at all.
        is_past = torch.arange(0, num_columns * block_size, block_size) >= key_lens[:, None]
        blocks = blocks.masked_fill(is_past, 0)
    keys = key_cache.index_select(0, blocks.flatten())
    return keys.view(num_requests, num_columns * block_size, -1)[:, : tile.num_keys].float()


def _score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """fp32 [G * n, S] from q [G * n, Hi, Di], weights [G * n, Hi] and keys [G, S, Di]."""
    num_requests, num_keys, head_dim = keys.shape
    num_heads = q.shape[1]
    per_request = q.float().reshape(num_requests, -1, head_dim)  # [G, n * Hi, Di]
    dots = torch.bmm(per_request, keys.transpose(1, 2)).relu_()
    per_head = dots.view(-1, num_heads, num_keys)  # [G * n, Hi, S]
    return torch.bmm(weights.float().unsqueeze(1), per_head).squeeze(1)
