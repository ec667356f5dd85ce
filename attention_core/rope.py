"""Rotary position tables, plain and yarn.

The formulas are those of the yarn paper (arXiv:2309.00071) as the released DeepSeek-V3 family
configures them; tests compare the numbers with the transformers package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_core.errors import AttentionConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Parameters of yarn context extension, named as in a model's config.json.

    Attributes:
        factor: Context extension; above 0. The loader resolves an absent one.
        original_max_position_embeddings: Context length of pre-training, in tokens.
        beta_fast: Rotations above which a frequency is left alone.
        beta_slow: Rotations below which a frequency is divided by factor.
        mscale: Numerator of the factor on cosines and sines; counts only together with the next.
        mscale_all_dim: Its denominator.
        attention_factor: The factor itself; overrides both.
        truncate: Round the ramp's ends to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines of every position.

    Attributes:
        cos: [max_positions, R] fp32; the R/2 frequencies tiled twice (not each repeated), yarn's
            factor folded in.
        sin: Like cos.
    """

    cos: Tensor
    sin: Tensor

    @property
    def max_positions(self) -> int:
        """Positions covered: 0 .. max_positions - 1."""
        return self.cos.shape[0]


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's magnitude correction ``0.1 * mscale * ln(factor) + 1``; 1 where nothing is extended.

    The softmax scale of a yarn model is multiplied by the square of this (of mscale_all_dim).
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def build_rope_table(
    head_dim: int, max_positions: int, theta: float, scaling: YarnScaling | None
) -> RopeTable:
    """Tabulate the rotation of every position.

    Args:
        head_dim: R; even.
        max_positions: Rows of the table, in tokens.
        theta: Base of the frequencies; above 1.
        scaling: Yarn parameters, None for plain rope.

    Raises:
        AttentionConfigError: An argument is impossible.
    """
    if head_dim < 2 or head_dim % 2:
        raise AttentionConfigError("head_dim", head_dim, "even and at least 2")
    if max_positions < 1:
        raise AttentionConfigError("max_positions", max_positions, "at least 1")
    if not theta > 1:
        raise AttentionConfigError("rope_theta", theta, "above 1")
    frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        inverse, magnitude = 1.0 / frequencies, 1.0
    else:
        inverse = _yarn_inverse_frequencies(frequencies, head_dim, theta, scaling)
        magnitude = _yarn_magnitude(scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse  # [max, R/2]
    angles = torch.cat((angles, angles), dim=-1)
    return RopeTable(cos=angles.cos() * magnitude, sin=angles.sin() * magnitude)


def _yarn_magnitude(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        above = yarn_mscale(scaling.factor, scaling.mscale)
        return above / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def _yarn_inverse_frequencies(
    frequencies: Tensor, head_dim: int, theta: float, scaling: YarnScaling
) -> Tensor:
    if not scaling.factor > 0:
        raise AttentionConfigError("rope_scaling.factor", scaling.factor, "above 0")
    original = scaling.original_max_position_embeddings
    if original < 1:
        raise AttentionConfigError(
            "rope_scaling.original_max_position_embeddings", original, "at least 1"
        )

    def channel_that_turns(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_that_turns(scaling.beta_fast), channel_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a slope
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1.0 - ramp.clamp(0.0, 1.0)  # 1 = frequency left alone, 0 = divided by factor
    return (1.0 / (scaling.factor * frequencies)) * (1.0 - kept) + (1.0 / frequencies) * kept
