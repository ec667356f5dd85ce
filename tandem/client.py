"""The blocking Python client of a decode service, or of any VllmEngine service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
from tandem.errors import ClientError, error_from_call
from tandem.generation import (
    Completion,
    GenerationReader,
    Piece,
    Prompt,
    SamplingOptions,
    broken_protocol,
    build_request,
)
from tandem.remote_tokenizer import TokenizerArchive, has_no_tokenizer


class Generation(Iterator[Piece]):
    """The pieces of one running generation; made by `Client.generate`.

    Leaving it early (`close`, a `with` block, or dropping it) cancels the request on the service.

        running -> complete | failed | closed
    """

    def __init__(self, call: Any, reader: GenerationReader) -> None:
        self._call = call
        self._reader = reader
        self._completion: Completion | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """The next piece.

        Raises:
            ClientError: The request failed; the class tells how.
        """
        if self._completion is not None:
            raise StopIteration
        try:
            for response in self._call:
                piece = self._reader.read(response)
                if piece is not None:
                    return piece
            self._completion = self._reader.finish(self._call.trailing_metadata())
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        raise StopIteration

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to one decode service. Safe to share between threads.

        with Client("127.0.0.1:50051") as client:
            for piece in client.generate("<bos> the same . alice river stone cloud ? alice"):
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
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._tokenizer: Tokenizer | None = None
        self._is_tokenizer_known = False
        self._tokenizer_lock = threading.Lock()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Starts a generation and returns its pieces as they come.

        Args:
            prompt: Text, or token ids.
            timeout_s: Time limit; None takes the client's.
            request_id: Name in logs and for `abort`; empty makes a random one.
            sampling: See `SamplingOptions`; greedy unless a temperature is given.

        Raises:
            ClientError: The request is invalid, or the service cannot be reached. Errors that
                the service reports come with the pieces.
        """
        request = build_request(prompt, request_id=request_id, **sampling)
        reader = GenerationReader(request, self.tokenizer())
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return Generation(
            self._stub.Generate(request, timeout=limit_s, metadata=self._metadata), reader
        )

    def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole answer; arguments and errors as `generate`, errors of the service included."""
        with self.generate(
            prompt, timeout_s=timeout_s, request_id=request_id, **sampling
        ) as generation:
            for _ in generation:
                pass
            return generation.completion

    def abort(self, request_id: str) -> None:
        """Ends a running request of any client; unknown ids are ignored.

        Raises:
            ClientError: The service refused or cannot be reached.
        """
        request = vllm_engine_pb2.AbortRequest(request_ids=[request_id])
        try:
            self._stub.Abort(request, timeout=METADATA_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _typed(error) from error

    def tokenizer(self) -> Tokenizer | None:
        """The served model's tokenizer, fetched once; None when the model has none.

        Raises:
            ClientError: The service cannot be reached, or sends no usable tokenizer.
        """
        with self._tokenizer_lock:
            if not self._is_tokenizer_known:
                self._tokenizer = self._fetch_tokenizer()
                self._is_tokenizer_known = True
            return self._tokenizer

    def _fetch_tokenizer(self) -> Tokenizer | None:
        archive = TokenizerArchive()
        try:
            for chunk in self._stub.GetTokenizer(
                common_pb2.GetTokenizerRequest(), timeout=METADATA_TIMEOUT_S
            ):
                archive.add(chunk)
        except grpc.RpcError as error:
            typed = _typed(error)
            if has_no_tokenizer(typed):
                return None
            raise typed from error
        return archive.open()

    def close(self) -> None:
        """Closes the connection; running generations are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _typed(error: grpc.RpcError) -> ClientError:
    """The typed error of a failed blocking call."""
    if not isinstance(error, grpc.Call):
        raise broken_protocol(f"gRPC failed without a status: {error!r}") from error
    return error_from_call(error)
