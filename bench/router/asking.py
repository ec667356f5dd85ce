"""One streamed request, straight to the service or through the router, and when its tokens came."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

_TIMEOUT_S = 60.0
_EVENT = b"data: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        first_s: From the request to its first token.
        num_tokens: Tokens, where they are counted.
        num_messages: Messages with tokens.
    """

    first_s: float
    num_tokens: int
    num_messages: int


class AnswerError(Exception):
    """The answer is not what was asked for."""


class Asking(Protocol):
    """A way to the service, kept open between requests."""

    def ask(self, max_tokens: int) -> Answer:
        """Send one request, and read its answer to the end."""

    def close(self) -> None:
        """Hang up."""


class DirectAsking:
    """Over gRPC, with token ids."""

    def __init__(self, address: str, prompt_token_ids: list[int]) -> None:
        """Connect."""
        self._channel = grpc.insecure_channel(address)
        self._generate = vllm_engine_pb2_grpc.VllmEngineStub(self._channel).Generate
        self._prompt = prompt_token_ids

    def ask(self, max_tokens: int) -> Answer:
        """As the protocol says."""
        request = vllm_engine_pb2.GenerateRequest(
            request_id="bench",
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=self._prompt),
            sampling_params=vllm_engine_pb2.SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
            stream=True,
        )
        started_s = time.perf_counter()
        first_s = 0.0
        num_tokens = num_messages = 0
        for reply in self._generate(request, timeout=_TIMEOUT_S):
            if reply.HasField("chunk"):
                if not num_messages:
                    first_s = time.perf_counter() - started_s
                num_messages += 1
                num_tokens += len(reply.chunk.token_ids)
        if num_tokens != max_tokens:
            raise AnswerError(f"{num_tokens} tokens instead of {max_tokens}")
        return Answer(first_s=first_s, num_tokens=num_tokens, num_messages=num_messages)

    def close(self) -> None:
        """As the protocol says."""
        self._channel.close()


class RoutedAsking:
    """Over HTTP through the router, with the prompt as text."""

    def __init__(self, address: str, model: str, prompt: str) -> None:
        """Connect with the first request."""
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        self._body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def ask(self, max_tokens: int) -> Answer:
        """As the protocol says; an event is a message, and its tokens are not counted."""
        body = json.dumps(self._body | {"max_tokens": max_tokens})
        started_s = time.perf_counter()
        first_s = 0.0
        num_messages = 0
        self._connection.request(
            "POST", "/v1/completions", body, {"Content-Type": "application/json"}
        )
        reply = self._connection.getresponse()
        if reply.status != http.client.OK:
            raise AnswerError(f"status {reply.status}: {reply.read()[:200]!r}")
        while line := reply.readline():
            if line.startswith(_EVENT) and b'"text"' in line:
                if not num_messages:
                    first_s = time.perf_counter() - started_s
                    _check_has_text(line)
                num_messages += 1
        if not num_messages:
            raise AnswerError("the stream has no event with text")
        return Answer(first_s=first_s, num_tokens=0, num_messages=num_messages)

    def close(self) -> None:
        """As the protocol says."""
        self._connection.close()


def _check_has_text(line: bytes) -> None:
    [choice] = json.loads(line.removeprefix(_EVENT))["choices"]
    if not choice["text"]:
        raise AnswerError("the first event has no text")
