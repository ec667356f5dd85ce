"""What a client asks for: sampling parameters, and the checks that both services make."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving_core.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
SEED_LIMIT = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the output ends.

    Attributes:
        temperature: Divides the logits; 0 means greedy.
        top_p: Keeps the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        min_p: Drops tokens less likely than min_p times the most likely one; 0 keeps all.
        seed: Seed of the counter-based generator; None lets the service choose one.
        max_tokens: Longest output, in tokens; None means what fits.
        min_tokens: No end token is sampled before this many tokens.
        stop: Strings that end the output.
        stop_token_ids: Token ids that end the output, beside the model's own.
        ignore_eos: The model's end tokens do not end the output.
        skip_special_tokens: Special tokens are left out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int) -> None:
        """Check every field against its limit.

        Raises:
            InvalidRequestError: Names the first wrong field, its value and the limit.
        """
        self._validate_distribution()
        self._validate_lengths()
        self._validate_stops(vocab_size)

    def _validate_distribution(self) -> None:
        _check_range("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _check_range("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("sampling_params.top_p", 0, "above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidRequestError("sampling_params.top_k", self.top_k, "at least 0")
        _check_range("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            raise InvalidRequestError("sampling_params.seed", self.seed, f"in [0, {SEED_LIMIT})")

    def _validate_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("sampling_params.max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0:
            raise InvalidRequestError("sampling_params.min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "sampling_params.min_tokens",
                self.min_tokens,
                f"at most max_tokens = {self.max_tokens}",
            )

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                "sampling_params.stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    "sampling_params.stop",
                    f"a string of {len(text)} characters",
                    f"1 to {MAX_STOP_STRING_CHARS} characters",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                "sampling_params.stop_token_ids",
                f"{len(self.stop_token_ids)} ids",
                f"at most {MAX_STOP_TOKEN_IDS}",
            )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    "sampling_params.stop_token_ids", token_id, f"in [0, {vocab_size - 1}]"
                )


def _check_range(name: str, value: float, *, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"sampling_params.{name}", value, f"in [{low:g}, {high:g}]")
