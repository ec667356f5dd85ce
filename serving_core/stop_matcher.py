"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces.

    The first is the one that ends first, the longest among those, which does not depend on how the
    text is cut into pieces. Text that may be the beginning of a stop string is held back.

        open -> matched

    Args:
        stop: the stop strings, none of them empty.
        include_stop_str_in_output: whether the stop string itself is part of the output.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; nothing is emitted after it."""
        return self._matched

    def push(self, text: str) -> str:
        """Adds text; returns what is certain to be output."""
        if self._matched is not None:
            return ""
        text = self._held + text
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if found:
            end, negative_length, self._matched = min(found)
            self._held = ""
            return text[:end] if self._include else text[: end + negative_length]
        num_held = self._num_possible_beginning(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The output is over: returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _num_possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
