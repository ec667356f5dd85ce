"""The digest of receipts: xxh3_64 over the rows of one component in ascending order."""

from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash

from kv_transfer.spans import ByteSpan

DIGEST_ALGORITHM = "xxh3_64"


class Digest(Protocol):
    """A digest that is being taken."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""

    def intdigest(self) -> int:
        """Return the digest of all bytes so far, as one 64-bit number."""


# A new digest of nothing. Links take one of these; a measurement may give them another.
NewDigest = Callable[[], Digest]
new_xxh3: NewDigest = xxhash.xxh3_64


def digest_rows(memory: memoryview, spans: Iterable[ByteSpan]) -> int:
    """Return the digest of the spans' bytes, as one 64-bit number.

    Thread-safe and without side effects, so a verifier may run it on an executor.

    Args:
        memory: One-dimensional view of bytes.
        spans: In digest order; `start` counts from the beginning of `memory`.
    """
    digest = new_xxh3()
    for span in spans:
        digest.update(memory[span.start : span.start + span.num_bytes])
    return digest.intdigest()
