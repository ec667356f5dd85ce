"""Retries as a share of the traffic, so that retries cannot feed an overload. Event loop only."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RetryBudget:
    """A purse that every request fills a little and every retry empties.

    Attributes:
        requests_per_retry: Requests that earn one retry.
        burst: Most retries that can be saved up; also what there is at the start.
    """

    requests_per_retry: int = 10
    burst: int = 10
    _saved_requests: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with a full purse."""
        self._saved_requests = self.burst * self.requests_per_retry

    def earn(self) -> None:
        """Count a request."""
        self._put(1)

    def spend(self, *, num_left: int = 0) -> bool:
        """Take one retry, if there is one and `num_left` others would remain."""
        if self._saved_requests < (1 + num_left) * self.requests_per_retry:
            return False
        self._saved_requests -= self.requests_per_retry
        return True

    def give_back(self) -> None:
        """Undo a `spend` whose retry did not take place."""
        self._put(self.requests_per_retry)

    def _put(self, num_requests: int) -> None:
        most = self.burst * self.requests_per_retry
        self._saved_requests = min(most, self._saved_requests + num_requests)
