"""Reads a client's GenerateRequest and refuses, before anything is reserved, what we cannot do.

Zero means "not set" in this protocol, so a zero becomes the neutral value. A field that asks for
something we lack is refused by name, never ignored. Fields that only shape text (spaces between
special tokens, stop strings in the output) have no effect here, because clients get token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving_core.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from serving_core.request import SamplingParams

# The protocol carries top_k as uint32; clients that mean "all" with -1 send this.
_TOP_K_MINUS_ONE = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request must keep to.

    Attributes:
        vocab_size: Token ids lie below it.
        max_model_len: Longest sequence, prompt and output, in tokens.
        max_sequence_tokens: Longest sequence that fits the empty pool of this service, in tokens.
        max_prompt_tokens: Longest prompt that fits the empty pool of some prefill service, in
            tokens; None as long as no prefill service has said.
    """

    vocab_size: int
    max_model_len: int
    max_sequence_tokens: int
    max_prompt_tokens: int | None


def refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Refuse fields that ask for what this service does not do.

    Raises:
        UnsupportedError: Names the first such field, its value and what is allowed.
    """
    for field in ("kv_transfer_params", "mm_inputs", "media_refs"):
        if request.HasField(field):
            raise UnsupportedError(field, "set", "unset")
    if request.extra_mm_inputs:
        raise UnsupportedError("extra_mm_inputs", f"{len(request.extra_mm_inputs)} items", "unset")
    if request.kv_transfer_params_json:
        raise UnsupportedError("kv_transfer_params_json", "set", "unset")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise UnsupportedError("data_parallel_rank", request.data_parallel_rank, "0 or unset")
    _refuse_unsupported_sampling(request.sampling_params)


def _refuse_unsupported_sampling(params: pb.SamplingParams) -> None:
    if params.n > 1:
        raise UnsupportedError("sampling_params.n", params.n, "1")
    for field in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(field):
            raise UnsupportedError(f"sampling_params.{field}", getattr(params, field), "unset")
    for field in ("frequency_penalty", "presence_penalty"):
        if getattr(params, field) != 0:
            raise UnsupportedError(f"sampling_params.{field}", getattr(params, field), "0")
    if params.repetition_penalty not in (0.0, 1.0):
        raise UnsupportedError("sampling_params.repetition_penalty", params.repetition_penalty, "1")
    if params.logit_bias:
        raise UnsupportedError(
            "sampling_params.logit_bias", f"{len(params.logit_bias)} ids", "none"
        )
    if (constraint := params.WhichOneof("constraint")) is not None:
        raise UnsupportedError(f"sampling_params.{constraint}", "set", "unset")


def parse_sampling(params: pb.SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Translate and check the sampling parameters.

    Raises:
        InvalidRequestError: Names the field, its value and the limit.
    """
    seed = params.seed if params.HasField("seed") and params.seed != -1 else None
    sampling = SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=0 if params.top_k == _TOP_K_MINUS_ONE else params.top_k,
        min_p=params.min_p,
        seed=seed if seed is None else seed % 2**64,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
    )
    sampling.validate(vocab_size)
    return sampling


def check_prompt(token_ids: Sequence[int], *, limits: RequestLimits) -> None:
    """Check the prompt by itself.

    Raises:
        InvalidRequestError: It is empty or holds an id outside the vocabulary.
        PromptTooLongError: It leaves no room for output, or fits no empty pool.
    """
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("prompt", "0 tokens", "not empty")
    bounds = [
        (limits.max_model_len - 1, f"max_model_len is {limits.max_model_len}"),
        (limits.max_sequence_tokens - 1, f"decode's pool holds {limits.max_sequence_tokens}"),
    ]
    if limits.max_prompt_tokens is not None:
        bounds.append((limits.max_prompt_tokens, "prefill's pool holds no more"))
    longest, reason = min(bounds)
    if num_tokens > longest:
        raise PromptTooLongError(
            "prompt", f"{num_tokens} tokens", f"at most {longest} tokens ({reason})"
        )
    largest = max(token_ids)
    if largest >= limits.vocab_size:
        raise InvalidRequestError("prompt token id", largest, f"in [0, {limits.vocab_size - 1}]")


def resolve_max_tokens(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    *,
    default_max_tokens: int | None,
    limits: RequestLimits,
) -> int:
    """Return how many tokens may be generated.

    Args:
        sampling: What the client asks for; unset means the default.
        num_prompt_tokens: Length of a prompt that `check_prompt` accepted.
        default_max_tokens: Used as far as it fits; None means as many as fit.
        limits: What bounds it.

    Raises:
        InvalidRequestError: More are asked for than fit, or fewer than min_tokens.
    """
    room = min(limits.max_model_len, limits.max_sequence_tokens) - num_prompt_tokens
    if sampling.max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
    elif sampling.max_tokens <= room:
        max_tokens = sampling.max_tokens
    else:
        raise InvalidRequestError(
            "sampling_params.max_tokens",
            sampling.max_tokens,
            f"at most {room} after a prompt of {num_prompt_tokens} tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            "sampling_params.min_tokens", sampling.min_tokens, f"at most {max_tokens}"
        )
    return max_tokens
