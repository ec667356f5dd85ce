"""Turns errors that a handler raises into statuses, and counts calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from serving_core.errors import TandemError
from serving_core.rpc.status import to_rpc_status

if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor

logger = logging.getLogger(__name__)


class RpcObserver(Protocol):
    """Is told of every finished call."""

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """Count one call of `method` that ended with `code` after `seconds`."""


class ErrorInterceptor(_ServerInterceptor):
    """Maps `TandemError` to its status, and anything unforeseen to INTERNAL with an error id.

    The details of unforeseen errors stay in the log: they may hold what a client must not see.
    """

    def __init__(self, observer: RpcObserver) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of the called method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            return self._wrap_streaming(handler, method)
        return self._wrap_unary(handler, method)

    def _wrap_unary(self, handler: Any, method: str) -> Any:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def call(request: Any, context: Any) -> Any:
            async with self._reporting(method, context):
                return await inner(request, context)

        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(call, handler.request_deserializer, handler.response_serializer)

    def _wrap_streaming(self, handler: Any, method: str) -> Any:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def call(request: Any, context: Any) -> None:
            async with self._reporting(method, context):
                result = inner(request, context)
                if hasattr(result, "__aiter__"):
                    async for reply in result:
                        await context.write(reply)
                else:
                    await result

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(call, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _reporting(self, method: str, context: Any) -> AsyncIterator[None]:
        started = monotonic()
        code = grpc.StatusCode.OK
        try:
            yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = context.code() or grpc.StatusCode.UNKNOWN
            raise
        except TandemError as error:
            status = to_rpc_status(error)
            code = status.code
            logger.info("rpc refused method=%s status=%s error=%s", method, code.name, error)
            await context.abort_with_status(status)
        except Exception:
            code = grpc.StatusCode.INTERNAL
            error_id = secrets.token_hex(8)
            logger.exception("rpc failed method=%s error_id=%s", method, error_id)
            # With details of ours, so that a caller can tell it from a broken transport.
            unforeseen = TandemError(f"internal error {error_id}; the service's log has it")
            await context.abort_with_status(to_rpc_status(unforeseen))
        finally:
            self._observer.rpc_finished(method, _name(code), monotonic() - started)


def _name(code: Any) -> str:
    return code.name if isinstance(code, grpc.StatusCode) else str(code)
