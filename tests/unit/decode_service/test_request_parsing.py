"""What a client may ask for, and how zero and unset are read."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.request_parsing import (
    RequestLimits,
    check_prompt,
    parse_sampling,
    refuse_unsupported,
    resolve_max_tokens,
)
from serving_core.errors import InvalidRequestError, PromptTooLongError, UnsupportedError

VOCAB_SIZE = 100
LIMITS = RequestLimits(
    vocab_size=VOCAB_SIZE, max_model_len=32, max_sequence_tokens=64, max_prompt_tokens=None
)


def test_sampling_all_zero_message_means_the_neutral_values() -> None:
    sampling = parse_sampling(pb.SamplingParams(), vocab_size=VOCAB_SIZE)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert sampling.seed is None
    assert sampling.max_tokens is None


def test_sampling_explicit_zero_temperature_is_greedy() -> None:
    sampling = parse_sampling(pb.SamplingParams(temperature=0.0), vocab_size=VOCAB_SIZE)
    assert sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("field", "sent", "attribute", "expected"),
    [
        ("top_k", 2**32 - 1, "top_k", 0),
        ("top_k", 5, "top_k", 5),
        ("seed", -1, "seed", None),
        ("seed", 0, "seed", 0),
        ("seed", -2, "seed", 2**64 - 2),
        ("stop_token_ids", [7], "stop_token_ids", (7,)),
        ("stop", ["x"], "stop", ("x",)),
    ],
)
def test_sampling_field_is_translated(
    field: str, sent: Any, attribute: str, expected: object
) -> None:
    sampling = parse_sampling(pb.SamplingParams(**{field: sent}), vocab_size=VOCAB_SIZE)
    assert getattr(sampling, attribute) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_sampling(pb.SamplingParams(**fields), vocab_size=VOCAB_SIZE)
    assert caught.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"json_schema": ""}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"grammar": "a"}, "grammar"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({"json_object": False}, "json_object"),
        ({"choice": pb.ChoiceConstraint(choices=["a"])}, "choice"),
    ],
)
def test_unsupported_sampling_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(**fields))
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(request)
    assert caught.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"kv_transfer_params": pb.KvTransferParams()}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ],
)
def test_unsupported_request_field_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(pb.GenerateRequest(**fields))
    assert caught.value.field == name


def test_neutral_values_that_routers_send_are_accepted() -> None:
    sampling = pb.SamplingParams(
        top_p=1.0, repetition_penalty=1.0, n=1, skip_special_tokens=True,
        spaces_between_special_tokens=True, include_stop_str_in_output=True,
    )  # fmt: skip
    refuse_unsupported(pb.GenerateRequest(sampling_params=sampling, data_parallel_rank=0))


@pytest.mark.parametrize("num_tokens", [1, 31])
def test_prompt_that_leaves_room_is_accepted(num_tokens: int) -> None:
    check_prompt([VOCAB_SIZE - 1] * num_tokens, limits=LIMITS)


def test_prompt_empty_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt = 0 tokens: must be not empty"):
        check_prompt([], limits=LIMITS)


@pytest.mark.parametrize(
    ("limits", "num_tokens", "words"),
    [
        (LIMITS, 32, "at most 31 tokens .max_model_len is 32"),
        (
            RequestLimits(
                vocab_size=9, max_model_len=99, max_sequence_tokens=16, max_prompt_tokens=None
            ),
            16,
            "at most 15 tokens .decode's pool holds 16",
        ),
        (
            RequestLimits(
                vocab_size=9, max_model_len=99, max_sequence_tokens=99, max_prompt_tokens=8
            ),
            9,
            "at most 8 tokens .prefill's pool",
        ),
    ],
)
def test_prompt_beyond_a_limit_is_refused_naming_it(
    limits: RequestLimits, num_tokens: int, words: str
) -> None:
    with pytest.raises(PromptTooLongError, match=words):
        check_prompt([1] * num_tokens, limits=limits)


def test_prompt_token_outside_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"100: must be in \[0, 99\]"):
        check_prompt([3, VOCAB_SIZE], limits=LIMITS)


@pytest.mark.parametrize(
    ("asked", "default", "expected"), [(None, None, 22), (None, 5, 5), (None, 50, 22), (22, 5, 22)]
)
def test_max_tokens_unset_takes_default_or_what_fits(
    asked: int | None, default: int | None, expected: int
) -> None:
    message = pb.SamplingParams() if asked is None else pb.SamplingParams(max_tokens=asked)
    sampling = parse_sampling(message, vocab_size=VOCAB_SIZE)
    found = resolve_max_tokens(sampling, 10, default_max_tokens=default, limits=LIMITS)
    assert found == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"max_tokens": 23}, "max_tokens"), ({"min_tokens": 23}, "min_tokens")],
)
def test_max_tokens_beyond_context_is_refused(fields: dict[str, Any], field: str) -> None:
    sampling = parse_sampling(pb.SamplingParams(**fields), vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="23: must be at most 22") as caught:
        resolve_max_tokens(sampling, 10, default_max_tokens=None, limits=LIMITS)
    assert caught.value.field == f"sampling_params.{field}"
