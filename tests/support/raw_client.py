"""The client protocol without our client, for tests that need its statuses and its streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a Generate call ended: OK with its tokens, or a status after a prefix of them."""

    token_ids: list[int]
    status: grpc.StatusCode
    details: str
    seconds: float
    finish_reason: str


def greedy_request(
    prompt: Sequence[int], max_tokens: int, *, request_id: str = "test", **sampling: Any
) -> vllm_engine_pb2.GenerateRequest:
    """A streaming greedy request that runs to `max_tokens`."""
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=list(prompt)),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, **fields),
        stream=True,
    )


@contextlib.contextmanager
def open_generate(
    address: str, request: vllm_engine_pb2.GenerateRequest, *, timeout_s: float = 60.0
) -> Iterator[Any]:
    """An open Generate call; leaving the block cancels it, as a client that goes away does."""
    with grpc.insecure_channel(address) as channel:
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=timeout_s)
        try:
            yield call
        finally:
            call.cancel()


def run_generate(
    address: str, request: vllm_engine_pb2.GenerateRequest, *, timeout_s: float = 60.0
) -> Outcome:
    """Runs one call to its end, whatever the end is."""
    started = monotonic()
    tokens: list[int] = []
    finish_reason = ""
    status, details = grpc.StatusCode.OK, ""
    with open_generate(address, request, timeout_s=timeout_s) as call:
        try:
            for reply in call:
                if reply.HasField("chunk"):
                    tokens.extend(reply.chunk.token_ids)
                else:
                    tokens.extend(reply.complete.output_ids)
                    finish_reason = reply.complete.finish_reason
        except grpc.RpcError as error:
            status, details = error.code(), error.details() or ""
    return Outcome(
        token_ids=tokens,
        status=status,
        details=details,
        seconds=monotonic() - started,
        finish_reason=finish_reason,
    )
