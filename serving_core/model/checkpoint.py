"""Tensors of a Hugging Face directory: one safetensors file, or several with an index.

Files are memory-mapped and parsed by the safetensors library; nothing is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serving_core.errors import CheckpointError
from serving_core.model.config_fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED_DTYPE_NAMES = "float32, bfloat16 or float16"
_HASH_PIECE_BYTES = 8 << 20


class Checkpoint:
    """The tensors of a model directory, open for reading; close it or use it in a `with`.

    Attributes:
        names: the names of all tensors.
    """

    def __init__(self, model_dir: Path) -> None:
        """Opens every file.

        Raises:
            CheckpointError: a file is missing, is no safetensors file, or lacks a tensor that the
                index places in it.
        """
        self._files: dict[str, Any] = {}
        self._location: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        if (model_dir / SINGLE_FILE).exists():
            self._location = dict.fromkeys(self._open(model_dir, SINGLE_FILE), SINGLE_FILE)
        else:
            self._open_shards(model_dir)
        self.names: Collection[str] = self._location.keys()

    def _open_shards(self, model_dir: Path) -> None:
        if not (model_dir / INDEX_FILE).exists():
            raise CheckpointError(
                field=SINGLE_FILE, value="missing", limit=f"{SINGLE_FILE} or {INDEX_FILE}"
            )
        self._location = _weight_map(model_dir / INDEX_FILE)
        for file_name in sorted(set(self._location.values())):
            stored = self._open(model_dir, file_name)
            for name, location in self._location.items():
                if location == file_name and name not in stored:
                    raise CheckpointError(
                        field=name, value="missing", limit=f"in {file_name}, as {INDEX_FILE} says"
                    )

    def _open(self, model_dir: Path, file_name: str) -> frozenset[str]:
        path = model_dir / file_name
        if not path.is_file():
            raise CheckpointError(field=file_name, value="missing", limit=f"a file {path}")
        try:
            self._files[file_name] = safe_open(path, framework="pt")
            return frozenset(self._files[file_name].keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                field=file_name, value=str(error), limit="a safetensors file"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the files; tensors that `read` returned keep their own mapping alive."""
        self._files.clear()

    @property
    def digests(self) -> Mapping[str, str]:
        """For every tensor read so far, a digest of its dtype, shape and bytes as stored."""
        return MappingProxyType(self._digests)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        stored = self._files[self._location[name]].get_slice(name)
        return tuple(stored.get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor as stored, a read-only view of the file.

        Raises:
            CheckpointError: the tensor is damaged or has a dtype that is not implemented.
        """
        try:
            tensor: Tensor = self._files[self._location[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(field=name, value=str(error), limit="a tensor") from error
        if tensor.dtype not in STORED_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(field=name, value=dtype, limit=_STORED_DTYPE_NAMES)
        self._digests[name] = _digest(tensor)
        return tensor


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            field=f"{path.name}: weight_map", value=weight_map, limit="an object, name to file"
        )
    for name, file_name in weight_map.items():
        # An index comes with a download; it must not name files elsewhere on the machine.
        if not isinstance(file_name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file_name):
            raise CheckpointError(
                field=f"{path.name}: {name}",
                value=file_name,
                limit="the name of a .safetensors file in the same directory",
            )
    return dict(weight_map)


def _digest(tensor: Tensor) -> str:
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(content), _HASH_PIECE_BYTES):
        hasher.update(content[start : start + _HASH_PIECE_BYTES].data)
    return hasher.hexdigest()
