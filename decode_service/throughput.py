"""How many tokens per second the service generated lately."""

from collections import deque
from collections.abc import Callable

_WINDOW_S = 10


class ThroughputMeter:
    """Counts tokens per whole second and averages over the last few. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero; `clock` gives monotonic seconds."""
        self._clock = clock
        self._counts: deque[tuple[int, int]] = deque()  # (second, tokens)

    def add(self, num_tokens: int) -> None:
        """Count tokens of now."""
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            num_tokens += self._counts.pop()[1]
        self._counts.append((second, num_tokens))
        self._forget()

    def tokens_per_s(self) -> float:
        """Return the mean over the window."""
        self._forget()
        return sum(num_tokens for _, num_tokens in self._counts) / _WINDOW_S

    def _forget(self) -> None:
        oldest = int(self._clock()) - _WINDOW_S
        while self._counts and self._counts[0][0] <= oldest:
            self._counts.popleft()
