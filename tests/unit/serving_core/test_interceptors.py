"""Errors of handlers over a real server: statuses, error ids, and nothing that leaks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from serving_core.errors import InvalidRequestError
from serving_core.rpc.interceptors import ErrorInterceptor

Handler = Callable[[bytes, Any], Awaitable[Any]]


class Calls:
    """Remembers finished calls."""

    def __init__(self) -> None:
        self.codes: list[tuple[str, str]] = []

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """Remember one."""
        assert seconds >= 0
        self.codes.append((method, code))


@asynccontextmanager
async def serving(handler: Any, *, streams: bool) -> AsyncIterator[tuple[Any, Calls]]:
    """A server with one method behind the interceptor, and a callable for it."""
    calls = Calls()
    server = grpc.aio.server(interceptors=[ErrorInterceptor(calls)])
    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    generic = grpc.method_handlers_generic_handler("test.Service", {"Do": make(handler)})
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        open_call = channel.unary_stream if streams else channel.unary_unary
        yield open_call("/test.Service/Do"), calls
    await server.stop(None)


async def refuse(request: bytes, context: Any) -> bytes:
    """Raise an error of ours."""
    raise InvalidRequestError("top_p", 2, "at most 1")


async def crash(request: bytes, context: Any) -> bytes:
    """Raise something unforeseen."""
    raise RuntimeError("a secret of the service")


async def stream_then_refuse(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Two replies, then an error."""
    yield b"1"
    yield b"2"
    raise InvalidRequestError("top_p", 2, "at most 1")


async def write_two(request: bytes, context: Any) -> None:
    """The other style of a streaming handler."""
    await context.write(b"1")
    await context.write(b"2")


async def test_error_of_ours_becomes_its_status_with_details() -> None:
    async with serving(refuse, streams=False) as (call, calls):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p = 2: must be at most 1" in (caught.value.details() or "")
    assert calls.codes == [("/test.Service/Do", "INVALID_ARGUMENT")]


async def test_unforeseen_error_is_internal_with_an_id_and_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with serving(crash, streams=False) as (call, calls):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
    told = caught.value.details() or ""
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in told
    [record] = caplog.records
    error_id = told.split()[2].rstrip(";")
    assert error_id in record.getMessage()
    assert record.exc_info is not None
    assert calls.codes == [("/test.Service/Do", "INTERNAL")]


async def test_stream_ends_with_the_status_after_its_replies() -> None:
    async with serving(stream_then_refuse, streams=True) as (call, calls):
        stream = call(b"")
        assert [await stream.read(), await stream.read()] == [b"1", b"2"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert calls.codes == [("/test.Service/Do", "INVALID_ARGUMENT")]


async def test_handler_that_writes_through_its_context_is_served() -> None:
    async with serving(write_two, streams=True) as (call, calls):
        assert [reply async for reply in call(b"")] == [b"1", b"2"]
    assert calls.codes == [("/test.Service/Do", "OK")]
