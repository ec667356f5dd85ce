"""The RPCs of vllm.grpc.engine.VllmEngine, as far as this service has them.

What it does not have answers UNIMPLEMENTED. Errors are raised here and become statuses in the
interceptor; a request is checked completely before anything is reserved for it.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.coordinator import RequestCoordinator
from decode_service.open_request import OpenRequest
from decode_service.request_reader import RequestReader
from decode_service.service_info import ServiceInfo
from decode_service.timings import TIMINGS_KEY
from decode_service.token_stream import Finish
from serving_core.errors import DrainingError, ModelNotFoundError
from serving_core.tokenizer import Tokenizer

MODEL_KEY = "x-tandem-model"
_TOKENIZER_CHUNK_BYTES = 64 * 1024

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DecodeServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Translates between the protocol and the coordinator."""

    def __init__(
        self,
        *,
        reader: RequestReader,
        coordinator: RequestCoordinator,
        info: ServiceInfo,
        tokenizer: Tokenizer,
        unhealthy_because: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """Take the collaborators.

        Args:
            reader: Checks requests.
            coordinator: Serves them.
            info: What the service tells about itself.
            tokenizer: Whose files GetTokenizer sends.
            unhealthy_because: Says why no request can be served now; empty when one can.
            clock: Monotonic seconds.
        """
        self._reader = reader
        self._coordinator = coordinator
        self._info = info
        self._tokenizer = tokenizer
        self._unhealthy_because = unhealthy_because
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        """Serve one request; streaming or not, the last message is Complete."""
        self._info.note_received()
        if self._coordinator.is_draining:
            raise DrainingError("this decode service is shutting down")
        self._check_model(context)
        valid, text_stops = await self._reader.read(request, time_left_s=context.time_remaining())
        one = self._coordinator.submit(valid, is_streaming=request.stream, text_stops=text_stops)
        try:
            await self._answer(one, context, is_streaming=request.stream)
        finally:
            self._coordinator.cancel(one)

    async def _answer(self, one: OpenRequest, context: _Context, *, is_streaming: bool) -> None:
        output_ids: tuple[int, ...] = ()
        if is_streaming:
            finish = await self._stream(one, context)
        else:
            delta = await one.stream.all_tokens()
            assert delta.finish is not None  # all_tokens returns at the end only
            output_ids, finish = delta.token_ids, delta.finish
        num_output_tokens = one.output.num_tokens
        timings = one.timings.to_json(now_s=self._clock(), num_output_tokens=num_output_tokens)
        context.set_trailing_metadata(((TIMINGS_KEY, timings),))
        await context.write(pb.GenerateResponse(complete=_complete(one, finish, output_ids)))

    async def _stream(self, one: OpenRequest, context: _Context) -> Finish:
        """Write tokens as they come; those that came while a write waited go out together."""
        while True:
            delta = await one.stream.next_delta()
            if delta.token_ids:
                chunk = pb.GenerateStreamChunk(
                    token_ids=delta.token_ids,
                    prompt_tokens=one.request.num_prompt_tokens,
                    completion_tokens=len(delta.token_ids),
                    cached_tokens=_num_cached_tokens(one),
                )
                await context.write(pb.GenerateResponse(chunk=chunk))
            if delta.finish is not None:
                return delta.finish

    def _check_model(self, context: _Context) -> None:
        """The protocol names no model; a client may name one in the metadata.

        Raises:
            ModelNotFoundError: It is not the one served here.
        """
        for key, value in context.invocation_metadata() or ():
            if key == MODEL_KEY and value != self._info.served_model_name:
                raise ModelNotFoundError(str(value), self._info.served_model_name)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """End every open request of the given names. Idempotent; unknown names are harmless."""
        for client_request_id in set(request.request_ids):
            self._coordinator.abort(client_request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """Tell whether a request could be served now."""
        problem = self._unhealthy_because()
        return pb.HealthCheckResponse(healthy=not problem, message=problem or "serving")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """Describe the model."""
        return self._info.model_info()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: _Context
    ) -> pb.GetServerInfoResponse:
        """Describe the service."""
        return self._info.server_info()

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:
        """Count requests and tokens."""
        return self._info.loads()

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> None:
        """Send the tokenizer's files as one zip in pieces; the last piece carries its SHA-256."""
        archive = await asyncio.to_thread(self._tokenizer.files_zip)
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), _TOKENIZER_CHUNK_BYTES):
            end = start + _TOKENIZER_CHUNK_BYTES
            is_last = end >= len(archive)
            await context.write(
                common_pb2.GetTokenizerChunk(
                    data=archive[start:end], sha256=digest if is_last else ""
                )
            )

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> None:
        """Not served."""
        await _unimplemented(context, "Embed")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: _Context) -> None:
        """Not served: there is no prefix cache yet."""
        await _unimplemented(context, "FlushCache")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> None:
        """Not served."""
        await _unimplemented(context, "StartProfile")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: _Context) -> None:
        """Not served."""
        await _unimplemented(context, "StopProfile")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> None:
        """Not served: routers poll GetLoads instead."""
        await _unimplemented(context, "SubscribeKvEvents")


async def _unimplemented(context: _Context, name: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")


def _num_cached_tokens(one: OpenRequest) -> int:
    return one.timings.landed.num_cached_tokens if one.timings.landed is not None else 0


def _complete(one: OpenRequest, finish: Finish, output_ids: tuple[int, ...]) -> pb.GenerateComplete:
    complete = pb.GenerateComplete(
        output_ids=output_ids,
        finish_reason=finish.reason.value,
        prompt_tokens=one.request.num_prompt_tokens,
        completion_tokens=one.output.num_tokens,
        cached_tokens=_num_cached_tokens(one),
    )
    if finish.matched_token_id is not None:
        complete.matched_token_id = finish.matched_token_id
    elif finish.matched_stop is not None:
        complete.matched_stop_str = finish.matched_stop
    return complete
