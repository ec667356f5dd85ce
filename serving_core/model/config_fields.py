"""Typed reading of a checkpoint's JSON objects; a key that nobody read must not matter."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from serving_core.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in the file at `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(field=path.name, value="missing", limit=f"a file {path}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(field=path.name, value=str(error), limit="readable JSON") from error
    if not isinstance(content, dict):
        raise CheckpointError(field=path.name, value=type(content).__name__, limit="a JSON object")
    return content


class ConfigFields:
    """The keys of one JSON object; remembers which were read, so that `finish` can name the rest.

    Args:
        content: the object.
        defaults: values of keys that the object may leave out.
        prefix: put before a key in errors, for nested objects.
    """

    def __init__(
        self, content: Mapping[str, object], defaults: Mapping[str, object], *, prefix: str = ""
    ) -> None:
        self._content = content
        self._defaults = defaults
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The key as errors show it."""
        return self._prefix + key

    def error(self, key: str, value: object, limit: str) -> CheckpointError:
        """An error about `key`."""
        return CheckpointError(field=self.name(key), value=value, limit=limit)

    def optional(self, key: str) -> object:
        """The value, else the default, else None."""
        self._read.add(key)
        return self._content.get(key, self._defaults.get(key))

    def required(self, key: str) -> object:
        """The value or the default.

        Raises:
            CheckpointError: there is neither.
        """
        self._read.add(key)
        if key in self._content:
            return self._content[key]
        if key in self._defaults:
            return self._defaults[key]
        raise self.error(key, "missing", "a value")

    def integer(self, key: str, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = self.required(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, value, f"an integer >= {minimum}")
        return value

    def number(self, key: str, *, minimum: float = 0.0) -> float:
        """A finite number above `minimum`."""
        value = self.required(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, value, "a number")
        if not math.isfinite(value) or value <= minimum:
            raise self.error(key, value, f"a finite number > {minimum:g}")
        return float(value)

    def boolean(self, key: str) -> bool:
        """A boolean."""
        value = self.required(key)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token id of the vocabulary, or None."""
        token_ids = self.token_ids(key, vocab_size)
        if len(token_ids) > 1:
            raise self.error(key, list(token_ids), "one token id")
        return token_ids[0] if token_ids else None

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """The token ids in a value that is null, an id or a list of ids."""
        value = self.optional(key)
        if value is None:
            return ()
        token_ids: list[int] = []
        for token_id in value if isinstance(value, list) else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise self.error(key, token_id, "a token id")
            if not -1 <= token_id < vocab_size:
                raise self.error(key, token_id, f"a token id below vocab_size {vocab_size}")
            # -1 is an old way to say that there is no such token.
            if token_id >= 0:
                token_ids.append(token_id)
        return tuple(token_ids)

    def words(self, key: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        """A list of words out of `allowed`, or None when the key is absent or null."""
        value = self.optional(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(key, value, "a list")
        for index, word in enumerate(value):
            if word not in allowed:
                raise self.error(f"{key}[{index}]", word, f"one of {sorted(allowed)}")
        return tuple(value)

    def fixed(self, key: str, implemented: object) -> None:
        """Reads a key of which one value is implemented; absent and null mean that value."""
        value = self.optional(key)
        if value is not None and value != implemented:
            raise self.error(key, value, f"{implemented!r}, which is what is implemented")

    def finish(self, *, harmless: Collection[str]) -> None:
        """Refuses keys that were not read and may matter.

        A key may matter unless it is in `harmless`, begins with an underscore (notes that libraries
        leave), or switches nothing on (null, false, an empty list or object).

        Raises:
            CheckpointError: names the first such key.
        """
        for key in sorted(self._content):
            value = self._content[key]
            switched_off = value is None or value is False or value in ([], {}, "")
            if key in self._read or key in harmless or key.startswith("_") or switched_off:
                continue
            raise self.error(key, value, "a field that this version implements")
