"""Which tickets are in use, and which must never be used (again).

A ticket id is bound to at most one job in its life. When its job ends, or when decode revokes a
ticket that never arrived here, the id is buried: a Grant that comes late is refused. A grave is
kept longer than any Grant can be under way, and the number of graves is bounded: when all are
taken, a Revoke of an unknown ticket is refused rather than forgotten. Owned by the event loop.
"""

from collections import OrderedDict
from collections.abc import Callable

from prefill_service.scheduler import JobId
from serving_core.errors import OverloadedError


class TicketBook:
    """Live tickets and tombstones."""

    def __init__(self, *, keep_s: float, max_graves: int, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            keep_s: How long a buried id is remembered.
            max_graves: Most ids remembered at one time.
            clock: Monotonic seconds.
        """
        self._keep_s = keep_s
        self._max_graves = max_graves
        self._clock = clock
        self._live: dict[bytes, JobId] = {}
        self._graves: OrderedDict[bytes, float] = OrderedDict()

    def bind(self, ticket_id: bytes, job_id: JobId) -> None:
        """Give an unused id to a job; the caller has asked `is_used`."""
        assert not self.is_used(ticket_id)
        self._live[ticket_id] = job_id

    def is_used(self, ticket_id: bytes) -> bool:
        """Tell whether the id belongs to a job or is buried."""
        self._forget_old()
        return ticket_id in self._live or ticket_id in self._graves

    def live_job(self, ticket_id: bytes) -> JobId | None:
        """Return the job that writes under the id, if there is one."""
        return self._live.get(ticket_id)

    def bury_live(self, ticket_id: bytes) -> None:
        """End the use of a bound id. Always possible: live tickets are bounded elsewhere."""
        del self._live[ticket_id]
        self._graves[ticket_id] = self._clock() + self._keep_s

    def bury_unknown(self, ticket_id: bytes) -> None:
        """Remember a revoked id that no job holds. Idempotent.

        Raises:
            OverloadedError: Too many ids are remembered; the ticket could come back to life.
        """
        self._forget_old()
        if ticket_id in self._graves:
            return
        if len(self._graves) >= self._max_graves:
            raise OverloadedError(
                f"{self._max_graves} revoked tickets are remembered already",
                retry_after_s=self._keep_s,
            )
        self._graves[ticket_id] = self._clock() + self._keep_s

    def _forget_old(self) -> None:
        """Drop graves past their time; all are kept equally long, so the oldest come first."""
        now_s = self._clock()
        while self._graves:
            ticket_id, until_s = next(iter(self._graves.items()))
            if until_s > now_s:
                return
            del self._graves[ticket_id]
