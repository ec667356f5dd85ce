"""One generation as a client sees it: what is asked, the pieces that come, and the whole.

Both clients build their requests and read their answers here, so that they cannot differ.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypedDict, Unpack, get_type_hints

import grpc
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2

from serving_core.stop_matcher import StopMatcher
from serving_core.tokenizer import IncrementalDetokenizer, Tokenizer
from tandem.errors import InvalidInputError, ServerError, text_metadata

TIMINGS_KEY = "tandem-timings-json"
_MAX_TOKEN_ID = 2**32 - 1
_UINT32 = FieldDescriptor.CPPTYPE_UINT32
_LIMITS = {
    _UINT32: f"an integer in [0, {_MAX_TOKEN_ID}]",
    FieldDescriptor.CPPTYPE_INT32: f"an integer in [{-(2**31)}, {2**31 - 1}]",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
}
"""What a field of the protocol can hold; all others hold text."""

Prompt = str | Sequence[int]
"""Text, or token ids."""


class SamplingOptions(TypedDict, total=False):
    """Sampling of one request; what is left out is the service's choice.

    `temperature` is 0 (greedy) when left out, so that equal prompts give equal answers.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What came at once.

    Attributes:
        token_ids: New tokens, in order. May be empty when only held-back text is left.
        text: New text: "" inside a character or a possible stop string, and without a tokenizer.
    """

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Generated tokens.
        cached_tokens: Prompt tokens that nobody had to compute.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one request went, in seconds. None means not measured or not reported.

    Attributes:
        ttft_s: From sending the request to its first token, measured by the client.
        tpot_s: Mean time per token after the first, measured by the client.
        total_s: From sending the request to its end, measured by the client.
        prefill_queue_s: Waiting in prefill's queue.
        prefill_compute_s: Computing the prompt.
        exposed_transfer_s: From the first token's arrival at decode until all KV was there and
            proven: the part of the transfer that compute did not hide.
        num_pushed_bytes: KV bytes that prefill pushed.
    """

    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    prefill_queue_s: float | None = None
    prefill_compute_s: float | None = None
    exposed_transfer_s: float | None = None
    num_pushed_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer.

    Attributes:
        token_ids: All generated tokens.
        text: Their text; None when the model has no tokenizer.
        finish_reason: "stop" or "length".
        usage: Token counts.
        timings: Where the time went.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    usage: Usage
    timings: Timings


def build_request(
    prompt: Prompt, *, request_id: str = "", **sampling: Unpack[SamplingOptions]
) -> vllm_engine_pb2.GenerateRequest:
    """The streaming request of a prompt.

    Raises:
        InvalidInputError: A value that the protocol cannot carry; all other limits are the
            service's to check.
        TypeError: An unknown sampling option.
    """
    unknown = sorted(set(sampling) - set(get_type_hints(SamplingOptions)))
    if unknown:
        raise TypeError(f"unknown sampling options: {', '.join(unknown)}")
    request = vllm_engine_pb2.GenerateRequest(
        request_id=request_id or f"tandem-{uuid.uuid4()}", stream=True
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        for token_id in prompt:
            if not 0 <= token_id <= _MAX_TOKEN_ID:
                raise InvalidInputError.local("prompt token id", token_id, _LIMITS[_UINT32])
        request.tokenized.input_ids.extend(prompt)
    params = request.sampling_params
    params.temperature = 0.0
    params.skip_special_tokens = True
    for name, value in sampling.items():
        _set_option(params, name, value)
    return request


def _set_option(params: vllm_engine_pb2.SamplingParams, name: str, value: object) -> None:
    if value is None:
        return
    # The protocol reads a zero as "not set", which means 1 here: the opposite of what is asked.
    if name == "top_p" and value == 0:
        raise InvalidInputError.local(name, value, "above 0 and at most 1")
    try:
        if name in ("stop", "stop_token_ids"):
            values = [value] if isinstance(value, str) else value
            getattr(params, name).extend(values)
        else:
            setattr(params, name, value)
    except (TypeError, ValueError) as error:
        # protobuf names neither the field nor, for a wrong type, what is right.
        cpp_type = params.DESCRIPTOR.fields_by_name[name].cpp_type
        limit = _LIMITS.get(cpp_type, "text")
        raise InvalidInputError.local(name, value, limit) from error


class GenerationReader:
    """Reads the responses of one call: pieces as they come, the whole in the end.

    Owned by one caller at a time.

        open -> complete (the final response was read) -> `finish`

    Args:
        request: What was asked.
        tokenizer: Makes text; None, or one that is not available, leaves text out.
        clock: Seconds, monotonic. Reading starts now.
    """

    def __init__(
        self,
        request: vllm_engine_pb2.GenerateRequest,
        tokenizer: Tokenizer | None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._detokenizer = _detokenizer(request, tokenizer)
        params = request.sampling_params
        self._stop_matcher = StopMatcher(
            tuple(params.stop), include_stop_str_in_output=params.include_stop_str_in_output
        )
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._complete: vllm_engine_pb2.GenerateComplete | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._started_at = clock()

    def read(self, response: vllm_engine_pb2.GenerateResponse) -> Piece | None:
        """The piece that a response carries; None when it carries neither tokens nor text."""
        if response.HasField("chunk"):
            return self._piece(response.chunk.token_ids, is_last=False)
        self._complete = response.complete
        # Services differ in whether the last message repeats all tokens, or carries the rest.
        num_missing = response.complete.completion_tokens - len(self._token_ids)
        rest = response.complete.output_ids[-num_missing:] if num_missing > 0 else ()
        return self._piece(rest, is_last=True)

    def _piece(self, token_ids: Sequence[int], *, is_last: bool) -> Piece | None:
        if token_ids:
            self._last_token_at = self._clock()
            if self._first_token_at is None:
                self._first_token_at = self._last_token_at
        self._token_ids.extend(token_ids)
        text = ""
        if self._detokenizer is not None:
            text = self._stop_matcher.push(self._detokenizer.push(token_ids))
            if is_last:
                text += self._stop_matcher.push(self._detokenizer.finish())
                text += self._stop_matcher.finish()
            self._text.append(text)
        if not token_ids and not text:
            return None
        return Piece(token_ids=tuple(token_ids), text=text)

    def finish(self, trailing_metadata: object) -> Completion:
        """The whole answer, after the call ended with OK.

        Args:
            trailing_metadata: Of the call; carries the timings that the service measured.

        Raises:
            ServerError: The call ended without its final response.
        """
        if self._complete is None:
            raise broken_protocol("the stream ended without its final response")
        usage = Usage(
            prompt_tokens=self._complete.prompt_tokens,
            completion_tokens=self._complete.completion_tokens,
            cached_tokens=self._complete.cached_tokens,
        )
        return Completion(
            token_ids=tuple(self._token_ids),
            text=None if self._detokenizer is None else "".join(self._text),
            finish_reason=self._complete.finish_reason,
            usage=usage,
            timings=self._timings(text_metadata(trailing_metadata, TIMINGS_KEY)),
        )

    def _timings(self, reported_json: str | None) -> Timings:
        first, last = self._first_token_at, self._last_token_at
        num_later = len(self._token_ids) - 1
        tpot_s = None
        if first is not None and last is not None and num_later > 0:
            tpot_s = (last - first) / num_later
        reported = _parse_timings(reported_json)
        num_pushed_bytes = reported.get("num_pushed_bytes")
        return Timings(
            ttft_s=None if first is None else first - self._started_at,
            tpot_s=tpot_s,
            total_s=self._clock() - self._started_at,
            prefill_queue_s=reported.get("prefill_queue_s"),
            prefill_compute_s=reported.get("prefill_compute_s"),
            exposed_transfer_s=reported.get("exposed_transfer_s"),
            num_pushed_bytes=None if num_pushed_bytes is None else int(num_pushed_bytes),
        )


def _detokenizer(
    request: vllm_engine_pb2.GenerateRequest, tokenizer: Tokenizer | None
) -> IncrementalDetokenizer | None:
    if tokenizer is None or not tokenizer.is_available:
        return None
    is_text = request.WhichOneof("input") == "text"
    context = tokenizer.encode(request.text) if is_text else list(request.tokenized.input_ids)
    return IncrementalDetokenizer(
        tokenizer, context, skip_special_tokens=request.sampling_params.skip_special_tokens
    )


def _parse_timings(reported_json: str | None) -> dict[str, float]:
    """Numbers by name; other services report none."""
    if reported_json is None:
        return {}
    try:
        reported = json.loads(reported_json)
    except json.JSONDecodeError as error:
        raise broken_protocol(f"{TIMINGS_KEY} is not JSON: {error}") from error
    if not isinstance(reported, dict):
        raise broken_protocol(f"{TIMINGS_KEY} is not a JSON object")
    return {name: value for name, value in reported.items() if isinstance(value, int | float)}


def broken_protocol(message: str) -> ServerError:
    """The error for an answer that no service should give."""
    return ServerError(grpc.StatusCode.INTERNAL, message)
