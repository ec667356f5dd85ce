"""Norms, rotations and cache writes. Letters: attention_core/shape.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Kernels.rms_norm; rounds to x's dtype before the weight, as the released models do."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See Kernels.layer_norm."""
    normed = functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return normed.to(x.dtype)


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Kernels.rope_half."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat(_turn(first, second, cos, sin), dim=-1).to(x.dtype)


def rope_interleaved_to_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Kernels.rope_interleaved_to_half."""
    wide = x.float()
    return torch.cat(_turn(wide[..., 0::2], wide[..., 1::2], cos, sin), dim=-1).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Kernels.rope_interleaved."""
    wide = x.float()
    turned = torch.stack(_turn(wide[..., 0::2], wide[..., 1::2], cos, sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _turn(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (first, second) [T, (N,) R/2]."""
    half = first.shape[-1]
    cos, sin = cos[:, :half], sin[:, :half]  # tiled twice: one half says it all
    if first.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return first * cos - second * sin, second * cos + first * sin


def scatter_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """See Kernels.scatter_rows. torch takes -1 for the last row, so drops are taken out here."""
    kept = (slots >= 0).nonzero().squeeze(1)
    if kept.shape[0] != slots.shape[0]:
        slots, rows = slots.index_select(0, kept), rows.index_select(0, kept)
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows.to(cache.dtype))
