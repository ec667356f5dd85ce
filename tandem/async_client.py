"""The asyncio twin of `tandem.client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from serving_core.tokenizer import Tokenizer
from tandem.channel import (
    CHANNEL_OPTIONS,
    DEFAULT_TIMEOUT_S,
    METADATA_TIMEOUT_S,
    call_metadata,
)
from tandem.errors import error_from_call
from tandem.generation import (
    Completion,
    GenerationReader,
    Piece,
    Prompt,
    SamplingOptions,
    build_request,
)
from tandem.remote_tokenizer import TokenizerArchive, has_no_tokenizer


class AsyncGeneration(AsyncIterator[Piece]):
    """The pieces of one running generation; made by `AsyncClient.generate`.

    Leaving it early (`close`, or an `async with` block) cancels the request on the service.

        running -> complete | failed | closed
    """

    def __init__(self, call: Any, reader: GenerationReader) -> None:
        self._call = call
        self._responses = aiter(call)
        self._reader = reader
        self._completion: Completion | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
            ClientError: The request failed; the class tells how.
        """
        if self._completion is not None:
            raise StopAsyncIteration
        try:
            async for response in self._responses:
                piece = self._reader.read(response)
                if piece is not None:
                    return piece
            self._completion = self._reader.finish(await self._call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        raise StopAsyncIteration

    @property
    def completion(self) -> Completion:
        """The whole answer, once the last piece was taken.

        Raises:
            ValueError: The generation is not complete.
        """
        if self._completion is None:
            raise ValueError("the generation is not complete: take all pieces first")
        return self._completion

    def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """A connection to one decode service, for one event loop.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for piece in await client.generate("<bos> the same ? alice", max_tokens=3):
                print(piece.text, end="")

    Args:
        address: host:port.
        timeout_s: Time limit of a generation, unless the call gives its own.
        model: Name of the model that must be served; empty takes whatever is.
        credentials: TLS credentials; None means plaintext.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        model: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._metadata = call_metadata(model)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._tokenizer: Tokenizer | None = None
        self._is_tokenizer_known = False
        self._tokenizer_lock = asyncio.Lock()

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGeneration:
        """Starts a generation and returns its pieces as they come; see `Client.generate`."""
        request = build_request(prompt, request_id=request_id, **sampling)
        reader = GenerationReader(request, await self.tokenizer())
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncGeneration(
            self._stub.Generate(request, timeout=limit_s, metadata=self._metadata), reader
        )

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole answer; see `Client.complete`."""
        async with await self.generate(
            prompt, timeout_s=timeout_s, request_id=request_id, **sampling
        ) as generation:
            async for _ in generation:
                pass
            return generation.completion

    async def abort(self, request_id: str) -> None:
        """Ends a running request of any client; see `Client.abort`."""
        request = vllm_engine_pb2.AbortRequest(request_ids=[request_id])
        try:
            await self._stub.Abort(request, timeout=METADATA_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error

    async def tokenizer(self) -> Tokenizer | None:
        """The served model's tokenizer, fetched once; see `Client.tokenizer`."""
        async with self._tokenizer_lock:
            if not self._is_tokenizer_known:
                self._tokenizer = await self._fetch_tokenizer()
                self._is_tokenizer_known = True
            return self._tokenizer

    async def _fetch_tokenizer(self) -> Tokenizer | None:
        archive = TokenizerArchive()
        try:
            async for chunk in self._stub.GetTokenizer(
                common_pb2.GetTokenizerRequest(), timeout=METADATA_TIMEOUT_S
            ):
                archive.add(chunk)
        except grpc.aio.AioRpcError as error:
            typed = error_from_call(error)
            if has_no_tokenizer(typed):
                return None
            raise typed from error
        return archive.open()

    async def close(self) -> None:
        """Closes the connection; running generations are cancelled. Idempotent."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
