"""Text to token ids and back, as `tokenizer.json` of a model's directory describes it.

A directory without one is served all the same: requests with token ids work, and whatever needs
text is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from serving_core.errors import CheckpointError, UnsupportedError
from serving_core.tokenizer_files import TOKENIZER_FILE, default_chat_template, pack

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, and so at most 4 tokens. What is still incomplete after twice as
# many tokens is invalid, and waiting for its end would be waiting for ever.
_MAX_HELD_TOKENS = 8
# Visible prompt tokens that are decoded before the first new one: how a token reads can depend on
# the token before it (a space, a byte of the same character).
_NUM_CONTEXT_TOKENS = 5
# Bytes of a character that is not complete.
_MAX_OPEN_BYTES = 3


class Tokenizer:
    """Turns text into token ids and back. Immutable; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer | None, model_dir: Path) -> None:
        """Use `from_dir`. `backend` is None where the directory has no tokenizer."""
        self._backend = backend
        self._model_dir = model_dir
        self._special_ids: frozenset[int] = frozenset()
        if backend is not None:
            added = backend.get_added_tokens_decoder()
            self._special_ids = frozenset(
                token_id for token_id, token in added.items() if token.special
            )

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Reads `tokenizer.json`, if there is one.

        Raises:
            CheckpointError: the file is no tokenizer, or a chat template cannot be read.
        """
        path = model_dir / TOKENIZER_FILE
        if not path.exists():
            return cls(None, model_dir)
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # The library raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise CheckpointError(TOKENIZER_FILE, str(error), "a tokenizer") from error
        # A file may ask for truncation or padding, which suits training batches, not requests.
        backend.no_truncation()
        backend.no_padding()
        default_chat_template(model_dir)  # a broken one is told now, not to the first router
        return cls(backend, model_dir)

    @property
    def is_available(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._backend is not None

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at the token; it skips unknown ids, and special ones if told."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._require("text output").id_to_token(token_id) is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that tokenizer.json adds.

        Raises:
            UnsupportedError: the model has no tokenizer.
        """
        return list(self._require("prompt text").encode(text).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; ids that the tokenizer does not know have none.

        Raises:
            UnsupportedError: the model has no tokenizer.
        """
        backend = self._require("text output")
        return backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def require(self, field: str) -> None:
        """Refuses a request whose `field` needs text.

        Raises:
            UnsupportedError: the model has no tokenizer.
        """
        self._require(field)

    def _require(self, field: str) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise UnsupportedError(field, "given", f"token ids: the model has no {TOKENIZER_FILE}")
        return self._backend

    def files_zip(self) -> bytes:
        """A zip of the tokenizer's files, the chat templates and the configuration.

        Raises:
            UnsupportedError: the model has no tokenizer.
            CheckpointError: a file is not what its name says.
        """
        self._require("tokenizer")
        return pack(self._model_dir)


class IncrementalDetokenizer:
    """Text of new tokens as they come, such that prompt text + all pieces = text of everything.

    A piece never ends inside a character: bytes of an incomplete one are held back. A character
    that the prompt leaves open belongs to the pieces. Owned by one caller at a time.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the prompt, whose end decides how the first new token reads.
        skip_special_tokens: whether special tokens are left out of the text.

    Raises:
        UnsupportedError: the model has no tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        tokenizer.require("text output")
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The window holds the tokens whose text is emitted, as context, and then the held ones.
        context, held = self._split_prompt_end(prompt_token_ids)
        self._window = context + held
        self._num_emitted_tokens = len(context)
        self._emitted_text = self._decode(context)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is complete now, often "" in a character's middle."""
        # One by one, so that the text does not depend on how many tokens come at once.
        pieces: list[str] = []
        for token_id in token_ids:
            if self._has_text(token_id):
                self._window.append(token_id)
                pieces.append(self._emit(is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Text of what is still held back, an incomplete character as U+FFFD."""
        return self._emit(is_last=True)

    def _emit(self, *, is_last: bool) -> str:
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_emitted_tokens
        is_incomplete = text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS
        if is_incomplete and not is_last:
            return ""
        # Bytes that were given up as invalid can change how the ones before them read.
        common = _common_length(self._emitted_text, text)
        if len(text) == common:
            return ""
        self._window = self._window[self._num_emitted_tokens :]
        self._num_emitted_tokens = len(self._window)
        self._emitted_text = self._decode(self._window)
        return text[common:]

    def _split_prompt_end(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt's last few tokens that have text, and the bytes of a character it leaves open.

        The first part begins and ends at a character: some decoders turn a whole run of byte tokens
        into U+FFFD when it is cut inside one.
        """
        latest: list[int] = []
        for token_id in reversed(token_ids):
            if len(latest) == _NUM_CONTEXT_TOKENS + 2 * _MAX_OPEN_BYTES:
                break
            if self._has_text(token_id):
                latest.append(token_id)
        latest.reverse()
        for num_open in range(min(_MAX_OPEN_BYTES, len(latest)) + 1):
            end = len(latest) - num_open
            for num_more in range(_MAX_OPEN_BYTES + 1):
                context = latest[max(end - _NUM_CONTEXT_TOKENS - num_more, 0) : end]
                text = self._decode(context)
                if not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT):
                    return context, latest[end:]
        # The prompt itself holds U+FFFD, or bytes that are no text.
        return latest[-_NUM_CONTEXT_TOKENS:], []

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _common_length(first: str, second: str) -> int:
    """Length of the longest text that both begin with."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
