"""A small VllmEngine service for client tests: real gRPC, answers as a test scripts them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

TIMINGS_JSON = (
    '{"prefill_queue_s": 0.25, "prefill_compute_s": 0.5, "exposed_transfer_s": 0.125,'
    ' "num_pushed_bytes": 4096, "another_s": 1}'
)

Responses = Iterator[vllm_engine_pb2.GenerateResponse]
Script = Callable[[vllm_engine_pb2.GenerateRequest, grpc.ServicerContext], Responses]


def chunk(*token_ids: int) -> vllm_engine_pb2.GenerateResponse:
    """A streamed piece."""
    return vllm_engine_pb2.GenerateResponse(
        chunk=vllm_engine_pb2.GenerateStreamChunk(token_ids=token_ids)
    )


def complete(
    num_tokens: int, *, output_ids: Sequence[int] = (), finish_reason: str = "length"
) -> vllm_engine_pb2.GenerateResponse:
    """The final response."""
    return vllm_engine_pb2.GenerateResponse(
        complete=vllm_engine_pb2.GenerateComplete(
            output_ids=output_ids,
            finish_reason=finish_reason,
            prompt_tokens=5,
            completion_tokens=num_tokens,
            cached_tokens=2,
        )
    )


def answer(
    *responses: vllm_engine_pb2.GenerateResponse, timings_json: str = TIMINGS_JSON
) -> Script:
    """A script that sends fixed responses."""

    def script(_: vllm_engine_pb2.GenerateRequest, context: grpc.ServicerContext) -> Responses:
        context.set_trailing_metadata((("tandem-timings-json", timings_json),))
        yield from responses

    return script


@dataclass(kw_only=True)
class FakeEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers Generate by its script and remembers what it was asked."""

    script: Script = field(default_factory=lambda: answer(complete(0)))
    tokenizer_zip: bytes | None = None
    tokenizer_sha256: str = ""
    requests: list[vllm_engine_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_tokenizer_calls: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Responses:
        """Runs the script; `ended` is set when the call is over, whoever ended it."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.ended.set)
        return self.script(request, context)

    def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Remembers the ids."""
        self.aborted.extend(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Sends the zip in two pieces."""
        self.num_tokenizer_calls += 1
        if self.tokenizer_zip is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the model has no tokenizer")
            return
        data = self.tokenizer_zip
        sha256 = self.tokenizer_sha256 or hashlib.sha256(data).hexdigest()
        middle = len(data) // 2
        yield common_pb2.GetTokenizerChunk(data=data[:middle])
        yield common_pb2.GetTokenizerChunk(data=data[middle:], sha256=sha256)


@contextlib.contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Serves the engine on a free port; yields its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(timeout=10)
