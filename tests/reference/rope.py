"""Rotary positions: a pair of channels is a point of the plane, turned by the pair's angle."""

from __future__ import annotations

from tests.reference.paging import Array


def turn(x: float, y: float, cos: float, sin: float) -> tuple[float, float]:
    """Turn the point (x, y); cos and sin may carry a common factor."""
    return x * cos - y * sin, x * sin + y * cos


def rope_interleaved(row: Array, cos: Array, sin: Array) -> Array:
    """Pairs (2c, 2c+1) of row [R] turn where they are; cos and sin [R/2 at least]."""
    out = row.copy()
    for pair in range(row.shape[0] // 2):
        out[2 * pair], out[2 * pair + 1] = turn(
            row[2 * pair], row[2 * pair + 1], cos[pair], sin[pair]
        )
    return out


def rope_half(row: Array, cos: Array, sin: Array) -> Array:
    """Pairs (c, c + R/2) of row [R] turn where they are."""
    out, half = row.copy(), row.shape[0] // 2
    for pair in range(half):
        out[pair], out[pair + half] = turn(row[pair], row[pair + half], cos[pair], sin[pair])
    return out


def rope_interleaved_to_half(row: Array, cos: Array, sin: Array) -> Array:
    """Pairs (2c, 2c+1) of row [R] turn and land at (c, c + R/2)."""
    out, half = row.copy(), row.shape[0] // 2
    for pair in range(half):
        out[pair], out[pair + half] = turn(row[2 * pair], row[2 * pair + 1], cos[pair], sin[pair])
    return out
