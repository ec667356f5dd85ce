"""Every error has a status; UNAVAILABLE is kept for what a retry can help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from serving_core import errors
from serving_core.rpc.status import status_rule, to_rpc_status

EXAMPLES: dict[type[errors.TandemError], errors.TandemError] = {
    errors.TandemError: errors.TandemError("x"),
    errors.InvalidRequestError: errors.InvalidRequestError("top_p", 2.0, "at most 1"),
    errors.PromptTooLongError: errors.PromptTooLongError("prompt", 9, "at most 8"),
    errors.UnsupportedError: errors.UnsupportedError("n", 2, "1"),
    errors.ModelNotFoundError: errors.ModelNotFoundError("a", "b"),
    errors.SessionUnknownError: errors.SessionUnknownError("s"),
    errors.LayoutMismatchError: errors.LayoutMismatchError("block_size", 64, 128),
    errors.OverloadedError: errors.OverloadedError("full", retry_after_s=1.5),
    errors.PoolExhaustedError: errors.PoolExhaustedError(4, 3),
    errors.PrefillUnavailableError: errors.PrefillUnavailableError("gone"),
    errors.ConfigError: errors.ConfigError(["a", "b"]),
    errors.CheckpointError: errors.CheckpointError("w", "missing", "present"),
}


def subclasses(base: type[errors.TandemError]) -> Iterator[type[errors.TandemError]]:
    """`base` and everything below it in serving_core."""
    if base.__module__ == errors.__name__:
        yield base
    for child in base.__subclasses__():
        yield from subclasses(child)


def example(error_class: type[errors.TandemError]) -> errors.TandemError:
    """An instance."""
    return EXAMPLES.get(error_class) or error_class("x")


def details(error: errors.TandemError) -> dict[str, Any]:
    """The packed details by type name."""
    packed = dict(to_rpc_status(error).trailing_metadata)["grpc-status-details-bin"]
    kinds = {
        "ErrorInfo": error_details_pb2.ErrorInfo,
        "RetryInfo": error_details_pb2.RetryInfo,
        "BadRequest": error_details_pb2.BadRequest,
    }
    found: dict[str, Any] = {}
    for detail in status_pb2.Status.FromString(packed).details:
        name = detail.type_url.rsplit(".", 1)[1]
        found[name] = kinds[name].FromString(detail.value)
    return found


@pytest.mark.parametrize("error_class", sorted(set(subclasses(errors.TandemError)), key=str))
def test_every_error_has_a_status_of_its_own_module(
    error_class: type[errors.TandemError],
) -> None:
    error = example(error_class)
    rule = status_rule(error)
    status = to_rpc_status(error)
    assert status.code is rule.code
    assert status.details
    assert details(error)["ErrorInfo"].reason == rule.reason
    assert rule.code is not grpc.StatusCode.OK


@pytest.mark.parametrize("error_class", sorted(set(subclasses(errors.TandemError)), key=str))
def test_unavailable_and_resource_exhausted_are_exactly_the_retryable_errors(
    error_class: type[errors.TandemError],
) -> None:
    error = example(error_class)
    retried = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    # An unknown session is repaired by decode itself, which never shows it to a client.
    if error_class is not errors.SessionUnknownError:
        assert (status_rule(error).code in retried) == error.retryable


def test_details_name_field_value_limit_and_delay() -> None:
    bad = details(errors.InvalidRequestError("top_p", 2.0, "at most 1"))
    assert dict(bad["ErrorInfo"].metadata) == {
        "field": "top_p",
        "value": "2.0",
        "limit": "at most 1",
    }
    assert bad["BadRequest"].field_violations[0].field == "top_p"
    overloaded = details(errors.OverloadedError("full", retry_after_s=1.5))
    assert overloaded["RetryInfo"].retry_delay.ToMilliseconds() == 1500


def test_long_values_are_shortened() -> None:
    text = str(errors.InvalidRequestError("prompt", "x" * 10_000, "short"))
    assert len(text) < 200
