"""The served model's tokenizer, as `GetTokenizer` sends it: one zip in pieces.

The zip comes from a service and is unpacked with care: flat names only, and bounded sizes.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from serving_core.errors import CheckpointError
from serving_core.tokenizer import Tokenizer
from tandem.errors import ClientError, IncompatibleError, InvalidInputError, NotFoundError
from tandem.generation import broken_protocol

_MAX_ZIP_BYTES = 64 * 2**20
_MAX_FILE_BYTES = 256 * 2**20


class TokenizerArchive:
    """Collects the pieces of the zip and opens it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._sha256 = ""

    def add(self, chunk: common_pb2.GetTokenizerChunk) -> None:
        """Adds the next piece.

        Raises:
            ServerError: The zip is larger than any tokenizer.
        """
        self._data += chunk.data
        self._sha256 = chunk.sha256 or self._sha256
        if len(self._data) > _MAX_ZIP_BYTES:
            raise broken_protocol(f"the tokenizer's zip exceeds {_MAX_ZIP_BYTES} bytes")

    def open(self) -> Tokenizer:
        """The tokenizer in the zip.

        Raises:
            ServerError: The zip is damaged or holds something else.
        """
        if hashlib.sha256(self._data).hexdigest() != self._sha256:
            raise broken_protocol("the tokenizer's zip does not match its sha256")
        with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
            _unpack(bytes(self._data), Path(folder))
            try:
                return Tokenizer.from_dir(Path(folder))
            except CheckpointError as error:
                raise broken_protocol(f"the service's tokenizer: {error}") from error


def has_no_tokenizer(error: ClientError) -> bool:
    """Whether the service says that its model has no tokenizer, so that only ids are possible."""
    return isinstance(error, IncompatibleError | InvalidInputError | NotFoundError)


def _unpack(data: bytes, folder: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if Path(entry.filename).name != entry.filename:
                    raise broken_protocol(f"the tokenizer's zip holds the path {entry.filename!r}")
                if entry.file_size > _MAX_FILE_BYTES:
                    raise broken_protocol(f"{entry.filename} exceeds {_MAX_FILE_BYTES} bytes")
                (folder / entry.filename).write_bytes(archive.read(entry))
    except zipfile.BadZipFile as error:
        raise broken_protocol(f"the tokenizer's zip is damaged: {error}") from error
