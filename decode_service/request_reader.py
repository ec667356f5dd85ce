"""Turns a client's message into a valid request, or refuses it. Reserves nothing."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.open_request import ValidRequest
from decode_service.request_output import TextStops
from decode_service.request_parsing import (
    RequestLimits,
    check_prompt,
    parse_sampling,
    refuse_unsupported,
    resolve_max_tokens,
)
from decode_service.stop_rule import StopRule
from serving_core.errors import DeadlineError, InvalidRequestError
from serving_core.stop_matcher import StopMatcher
from serving_core.tokenizer import IncrementalDetokenizer, Tokenizer

_SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderDefaults:
    """What counts where a client says nothing.

    Attributes:
        eos_token_ids: End the output unless the client ignores them.
        max_tokens: Longest output; None means what fits.
        timeout_s: Time limit.
    """

    eos_token_ids: tuple[int, ...]
    max_tokens: int | None
    timeout_s: float


class RequestReader:
    """Knows the model's limits; `read` may run for many requests at once."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        limits: Callable[[], RequestLimits],
        defaults: ReaderDefaults,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        """Take the collaborators.

        Args:
            tokenizer: Of the model.
            limits: Returns the limits of now: prefill services come and go.
            defaults: For what a client leaves out.
            executor: Where text is tokenized.
            clock: Monotonic seconds.
        """
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = defaults
        self._executor = executor
        self._clock = clock

    async def read(
        self, message: pb.GenerateRequest, *, time_left_s: float | None
    ) -> tuple[ValidRequest, TextStops | None]:
        """Check everything.

        Args:
            message: The client's.
            time_left_s: Until the client's deadline; None when it sets none.

        Returns:
            The request, and its stop strings if it has any.

        Raises:
            InvalidRequestError: Names the field, its value and the limit.
            DeadlineError: The client's deadline has passed.
        """
        deadline_s = self._deadline_s(time_left_s)
        limits = self._limits()
        refuse_unsupported(message)
        sampling = parse_sampling(message.sampling_params, vocab_size=limits.vocab_size)
        if sampling.stop:
            self._tokenizer.require("sampling_params.stop")
        prompt_token_ids = await self._prompt(message)
        check_prompt(prompt_token_ids, limits=limits)
        max_tokens = resolve_max_tokens(
            sampling,
            len(prompt_token_ids),
            default_max_tokens=self._defaults.max_tokens,
            limits=limits,
        )
        eos_token_ids = () if sampling.ignore_eos else self._defaults.eos_token_ids
        request = ValidRequest(
            client_request_id=message.request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
            stop_rule=StopRule(
                stop_token_ids=frozenset((*sampling.stop_token_ids, *eos_token_ids)),
                min_tokens=sampling.min_tokens,
                max_tokens=max_tokens,
            ),
            deadline_s=deadline_s,
        )
        return request, self._text_stops(request)

    def _deadline_s(self, time_left_s: float | None) -> float:
        if time_left_s is None:
            time_left_s = self._defaults.timeout_s
        if time_left_s <= 0:
            raise DeadlineError("the request's time ran out")
        return self._clock() + time_left_s

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        kind = message.WhichOneof("input")
        if kind == "tokenized":
            return tuple(message.tokenized.input_ids)
        if kind == "text":
            self._tokenizer.require("text")
            loop = asyncio.get_running_loop()
            return tuple(
                await loop.run_in_executor(self._executor, self._tokenizer.encode, message.text)
            )
        raise InvalidRequestError("input", "unset", "text or tokenized")

    def _text_stops(self, request: ValidRequest) -> TextStops | None:
        sampling = request.sampling
        if not sampling.stop:
            return None
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        return TextStops(
            detokenizer=detokenizer,
            matcher=StopMatcher(sampling.stop),
            min_tokens=sampling.min_tokens,
        )
