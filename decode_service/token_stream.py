"""The tokens of one request on their way from the event loop to the handler of its stream.

The batch never waits for a reader. Tokens that wait together are read together, so a slow reader
gets fewer and longer messages; one that leaves more than `max_unread_tokens` unread is cut off
with RESOURCE_EXHAUSTED. Owned by the event loop thread; one reader.

    open -> (finish | fail) -> read to the end
"""

import asyncio
from dataclasses import dataclass, field

from decode_service.stop_rule import FinishReason
from serving_core.errors import OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a request ended well.

    Attributes:
        reason: Why it ended.
        matched_token_id: The stop id that ended it; None when none did.
        matched_stop: The stop string that ended it; None when none did.
    """

    reason: FinishReason
    matched_token_id: int | None = None
    matched_stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What the reader gets at once.

    Attributes:
        token_ids: New tokens, in order; empty only together with `finish`.
        finish: Set with the last delta.
    """

    token_ids: tuple[int, ...]
    finish: Finish | None


@dataclass(slots=True, kw_only=True)
class TokenStream:
    """A bounded buffer with one reader; `max_unread_tokens` is its bound."""

    max_unread_tokens: int
    retry_after_s: float
    _token_ids: list[int] = field(default_factory=list)
    _finish: Finish | None = None
    _error: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        """Whether neither `finish` nor `fail` was called."""
        return self._finish is None and self._error is None

    @property
    def end_reason(self) -> str:
        """How it ended, for metrics: a finish reason, "error", or "open"."""
        if self._finish is not None:
            return self._finish.reason.value
        return "open" if self._error is None else "error"

    def put(self, token_id: int) -> bool:
        """Add a token. Returns False, and ends the stream, when the reader is too far behind."""
        if not self.is_open:
            return False
        if len(self._token_ids) >= self.max_unread_tokens:
            self.fail(
                OverloadedError(
                    f"{len(self._token_ids)} tokens wait for the client to read them, "
                    f"the limit is {self.max_unread_tokens}",
                    retry_after_s=self.retry_after_s,
                )
            )
            return False
        self._token_ids.append(token_id)
        self._changed.set()
        return True

    def finish(self, finish: Finish) -> None:
        """End well, after what is unread. The first end counts."""
        if self.is_open:
            self._finish = finish
            self._changed.set()

    def fail(self, error: Exception) -> None:
        """End with an error at once; what is unread is dropped. The first end counts."""
        if self.is_open:
            self._error = error
            self._token_ids.clear()
            self._changed.set()

    async def next_delta(self) -> TokenDelta:
        """Wait for tokens or the end. The wait is bounded by the request's deadline.

        Raises:
            Exception: The error given to `fail`.
        """
        while not self._token_ids and self.is_open:
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    async def all_tokens(self) -> TokenDelta:
        """Wait for the end and return everything; bounded like `next_delta`.

        Raises:
            Exception: The error given to `fail`.
        """
        while self.is_open:
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def _take(self) -> TokenDelta:
        if self._error is not None:
            raise self._error
        token_ids = tuple(self._token_ids)
        self._token_ids.clear()
        return TokenDelta(token_ids=token_ids, finish=self._finish)
