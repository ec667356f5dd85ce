"""The files of a model's directory that a router or a client needs to tokenize and render chats.

Two files are not sent as they are, because readers differ in what they look at first:

- `chat_template.json` holds the one template that the model's makers mean, so that every reader
  renders with it: readers disagree on lists of templates, further .jinja files and white space.
- `config.json` loses its `architectures` where there is a template. The smg router takes
  DeepseekV32ForCausalLM as a sign to render chats in its own way instead of by the template.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from serving_core.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.json"
_MODEL_CONFIG_FILE = "config.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_JINJA_FILE = "chat_template.jinja"
_SENT_AS_THEY_ARE = (
    TOKENIZER_FILE,
    _TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
# The earliest time that a zip can hold: equal directories give equal archives.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


def default_chat_template(model_dir: Path) -> str | None:
    """The template that renders chats unless another is asked for; None if the model has none.

    As in transformers, `chat_template.jinja` comes before `tokenizer_config.json`, and of several
    templates the one named "default" counts. `chat_template.json` is the last resort.

    Raises:
        CheckpointError: A file is not what its name says.
    """
    jinja = model_dir / _JINJA_FILE
    if jinja.is_file():
        return _read_text(jinja)
    template = _read_json(model_dir / _TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is None:
        template = _read_json(model_dir / TEMPLATE_FILE).get("chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("chat_template", type(template).__name__, "text")
    return template


def pack(model_dir: Path) -> bytes:
    """A zip of the files; equal files give equal bytes. What the directory lacks is left out.

    Raises:
        CheckpointError: A file is not what its name says.
    """
    template = default_chat_template(model_dir)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for path in [model_dir / name for name in _SENT_AS_THEY_ARE] + sorted(
            model_dir.glob("*.jinja")
        ):
            if path.is_file():
                _add(target, path.name, path.read_bytes())
        model_config = _read_json(model_dir / _MODEL_CONFIG_FILE)
        if template is not None:
            model_config.pop("architectures", None)
            _add(target, TEMPLATE_FILE, _to_json({"chat_template": template}))
        if model_config:
            _add(target, _MODEL_CONFIG_FILE, _to_json(model_config))
    return archive.getvalue()


def _add(target: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=_ZIP_TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    target.writestr(entry, content)


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(path.name, str(error), "JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(path.name, type(value).__name__, "a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path.name, str(error), "UTF-8 text") from error
