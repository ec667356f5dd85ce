"""Errors of the services.

    TandemError
    ├── InvalidRequestError          a field of a request is wrong; the caller must change it
    │   ├── PromptTooLongError       the prompt fits no context or no empty pool
    │   └── UnsupportedError         the field asks for something this version does not do
    ├── ModelNotFoundError           the named model is not served here
    ├── SessionUnknownError          the hand-off names a handshake that this process does not know
    ├── LayoutMismatchError          two services cannot exchange KV
    ├── OverloadedError              a queue, a pool or a buffer is full; retry later
    │   └── PoolExhaustedError       not enough free blocks
    ├── PrefillUnavailableError      no prefill service can take the request now, or it died
    ├── KvCorruptError               pushed KV failed its check; never served
    ├── DrainingError                the service is shutting down
    ├── DeadlineError                the request's time ran out
    ├── RequestCancelledError        the client went away or asked to stop
    ├── ComputeError                 a model step raised
    └── StartupError                 the process cannot start
        ├── ConfigError              all problems of a configuration at once
        └── CheckpointError          a checkpoint cannot be loaded

Values are shortened before they reach a message; prompt text never gets into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

_MAX_VALUE_CHARS = 80


def shorten(value: object) -> str:
    """`value` as text of bounded length, fit for a message."""
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


class TandemError(Exception):
    """Base of all errors that a service reports.

    Attributes:
        retryable: Whether the same request can succeed later or elsewhere.
    """

    retryable: ClassVar[bool] = False


class InvalidRequestError(TandemError):
    """A field of a request is wrong.

    Args:
        field: Name of the field as the caller knows it.
        value: What it holds, or a description of it.
        limit: What is allowed.
    """

    def __init__(self, field: str, value: object, limit: object) -> None:
        self.field = field
        self.value = shorten(value)
        self.limit = shorten(limit)
        super().__init__(f"{field} = {self.value}: must be {self.limit}")


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room in the context, or fits no empty pool."""


class UnsupportedError(InvalidRequestError):
    """The field asks for something that this version does not do."""


class ModelNotFoundError(TandemError):
    """The named model is not served here.

    Args:
        model: The name that was asked for.
        served: The name that is served.
    """

    def __init__(self, model: str, served: str) -> None:
        self.model = shorten(model)
        self.served = served
        super().__init__(f"model = {self.model}: this service serves {served}")


class SessionUnknownError(TandemError):
    """The hand-off names a handshake that this process does not know; shake hands again."""

    retryable = True

    def __init__(self, session_id: str) -> None:
        self.session_id = shorten(session_id)
        super().__init__(f"session_id = {self.session_id}: no such handshake in this process")


class LayoutMismatchError(TandemError):
    """Two services cannot exchange KV.

    Args:
        field: First field in which they differ.
        ours: Value of the side that reports it.
        theirs: Value of the other side.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = shorten(ours)
        self.theirs = shorten(theirs)
        super().__init__(f"{field}: ours is {self.ours}, the peer's is {self.theirs}")


class OverloadedError(TandemError):
    """A queue, a pool or a buffer is full.

    Args:
        message: What is full, and its limit.
        retry_after_s: When a retry makes sense, in seconds.
    """

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class PoolExhaustedError(OverloadedError):
    """Not enough free blocks.

    Args:
        num_wanted: Blocks asked for.
        num_free: Blocks that are free.
    """

    def __init__(self, num_wanted: int, num_free: int) -> None:
        self.num_wanted = num_wanted
        self.num_free = num_free
        super().__init__(f"{num_wanted} blocks wanted, {num_free} are free")


class PrefillUnavailableError(TandemError):
    """No prefill service can take the request now, or the one that had it failed."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.5) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class KvCorruptError(TandemError):
    """Pushed KV failed its check and was not served; a retry computes it anew."""

    retryable = True


class DrainingError(TandemError):
    """The service is shutting down; another one can take the request."""

    retryable = True


class DeadlineError(TandemError):
    """The request's time ran out."""


class RequestCancelledError(TandemError):
    """The client went away or asked to stop."""


class ComputeError(TandemError):
    """A model step raised."""


class StartupError(TandemError):
    """The process cannot start."""


class ConfigError(StartupError):
    """A configuration has problems.

    Args:
        problems: All of them, one sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class CheckpointError(StartupError):
    """A checkpoint cannot be loaded.

    Args:
        field: Name of the tensor, file or configuration key.
        value: What was found.
        limit: What was expected.
    """

    def __init__(self, field: str, value: object, limit: object) -> None:
        self.field = field
        self.value = shorten(value)
        self.limit = shorten(limit)
        super().__init__(f"{field} = {self.value}: must be {self.limit}")
