"""The digest of receipts: xxh3_64 over the rows of one component in ascending order."""

from collections.abc import Iterable

import xxhash

from kv_transfer.spans import ByteSpan

DIGEST_ALGORITHM = "xxh3_64"


def digest_rows(memory: memoryview, spans: Iterable[ByteSpan]) -> int:
    """Return the digest of the spans' bytes, as one 64-bit number.

    Thread-safe and without side effects, so a verifier may run it on an executor.

    Args:
        memory: One-dimensional view of bytes.
        spans: In digest order; `start` counts from the beginning of `memory`.
    """
    digest = xxhash.xxh3_64()
    for span in spans:
        digest.update(memory[span.start : span.start + span.num_bytes])
    return digest.intdigest()
