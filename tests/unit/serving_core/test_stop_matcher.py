"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.stop_matcher import StopMatcher


def run(stop: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The whole output and what matched."""
    matcher = StopMatcher(stop, include_stop_str_in_output=include)
    output = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    return output, matcher.matched


def test_stop_matcher_without_stops_passes_text_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("text") == "text"
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_stop_matcher_possible_beginning_is_held_until_decided() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("d") == "ENd"
    assert matcher.push(" EN") == " "
    assert matcher.push("D and more") == ""
    assert matcher.matched == "END"
    assert matcher.push("nothing after it") == ""
    assert matcher.finish() == ""


def test_stop_matcher_end_of_output_releases_held_text() -> None:
    assert run(["END"], ["all E", "N"]) == ("all EN", None)


@pytest.mark.parametrize(("include", "output"), [(False, "a"), (True, "aXY")])
def test_stop_matcher_match_is_cut_off_or_included(include: bool, output: str) -> None:
    assert run(["XY"], ["aX", "Yb"], include=include) == (output, "XY")


def test_stop_matcher_earliest_end_wins_then_longest() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


@given(
    text=st.text(alphabet="ab", max_size=24),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_stop_matcher_any_cut_gives_same_output(
    text: str, stop: list[str], include: bool, seed: int
) -> None:
    rng = random.Random(seed)
    pieces, start = [], 0
    while start < len(text):
        size = rng.randint(0, 5)
        pieces.append(text[start : start + size])
        start += size
    output, matched = run(stop, pieces, include=include)
    assert (output, matched) == run(stop, list(text), include=include)
    assert text.startswith(output)
    if matched is None:
        assert output == text
        assert not any(string in text for string in stop)
    else:
        before = output.removesuffix(matched) if include else output
        assert text.startswith(before + matched)
