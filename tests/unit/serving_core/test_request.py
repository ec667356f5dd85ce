"""Sampling parameters: each wrong field is refused by name, value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from serving_core.errors import InvalidRequestError
from serving_core.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", ("a",) * 65),
        ("stop", ("a" * 2000,)),
        ("stop_token_ids", (8,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=8)
    assert caught.value.field == f"sampling_params.{field}"
    assert caught.value.value
    assert caught.value.limit


def test_min_tokens_above_max_tokens_names_both() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens = 5.*max_tokens = 4"):
        SamplingParams(max_tokens=4, min_tokens=5).validate(vocab_size=8)


def test_edges_are_allowed() -> None:
    SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=1.0,
        seed=2**64 - 1,
        max_tokens=1,
        min_tokens=1,
        stop=("a",),
        stop_token_ids=(0, 7),
    ).validate(vocab_size=8)
