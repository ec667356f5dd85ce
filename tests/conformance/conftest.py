"""Fixtures of the conformance suites."""

from __future__ import annotations

import pytest

from tests.support.kernel_cases import Backend, all_backends


@pytest.fixture(scope="module", params=all_backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation of the operators, in turn."""
    chosen: Backend = request.param
    return chosen
