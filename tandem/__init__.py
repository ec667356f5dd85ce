"""Tandem: prefill and decode on separate machines. The public Python surface.

Names are loaded when first used, because the services import `tandem.v1` and need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.async_client import AsyncClient, AsyncGeneration
    from tandem.client import Client, Generation
    from tandem.default_model import default_model_dir
    from tandem.errors import (
        CancelledError,
        ClientError,
        IncompatibleError,
        InvalidInputError,
        NotFoundError,
        OverloadedError,
        ServerError,
        TimeoutExceededError,
        UnavailableError,
    )
    from tandem.generation import Completion, Piece, SamplingOptions, Timings, Usage

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "CancelledError",
    "Client",
    "ClientError",
    "Completion",
    "Generation",
    "IncompatibleError",
    "InvalidInputError",
    "NotFoundError",
    "OverloadedError",
    "Piece",
    "SamplingOptions",
    "ServerError",
    "TimeoutExceededError",
    "Timings",
    "UnavailableError",
    "Usage",
    "default_model_dir",
]

_MODULES = {
    "tandem.async_client": ("AsyncClient", "AsyncGeneration"),
    "tandem.client": ("Client", "Generation"),
    "tandem.default_model": ("default_model_dir",),
    "tandem.generation": ("Completion", "Piece", "SamplingOptions", "Timings", "Usage"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "tandem.errors")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
