"""What a router gets to tokenize and to render chats, against what transformers would use."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from serving_core.errors import CheckpointError
from serving_core.tokenizer import Tokenizer
from serving_core.tokenizer_files import default_chat_template, pack

IN_CONFIG = "config {{ messages }}"
IN_JINJA = "jinja {{ messages }}\n"
IN_JSON = "json {{ messages }}"


@pytest.fixture
def model_dir(recall_dir: Path, tmp_path: Path) -> Path:
    """A model without a template, and with a file that nobody needs for chats."""
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
    ):
        content = (recall_dir / name).read_bytes()
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"large")
    return tmp_path


def put_in_config(model_dir: Path, template: Any) -> None:
    """Add a template, or a list of them, to tokenizer_config.json."""
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def unpacked(model_dir: Path) -> dict[str, bytes]:
    """Contents of the zip by name."""
    with zipfile.ZipFile(io.BytesIO(pack(model_dir))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_zip_without_a_template_holds_the_files_as_they_are(model_dir: Path) -> None:
    files = unpacked(model_dir)
    assert sorted(files) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert files["tokenizer.json"] == (model_dir / "tokenizer.json").read_bytes()
    config = json.loads((model_dir / "config.json").read_text())
    assert json.loads(files["config.json"]) == config
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    assert pack(model_dir) == pack(model_dir)
    assert Tokenizer.from_dir(model_dir).files_zip() == pack(model_dir)


@pytest.mark.parametrize("where", ["config", "jinja", "both", "json"])
def test_zip_names_the_template_once_for_all_readers(model_dir: Path, where: str) -> None:
    if where in ("config", "both"):
        put_in_config(model_dir, IN_CONFIG)
    if where in ("jinja", "both"):
        (model_dir / "chat_template.jinja").write_text(IN_JINJA)
    if where == "json":
        (model_dir / "chat_template.json").write_text(json.dumps({"chat_template": IN_JSON}))
    expected = {"config": IN_CONFIG, "jinja": IN_JINJA, "both": IN_JINJA, "json": IN_JSON}[where]
    files = unpacked(model_dir)
    assert json.loads(files["chat_template.json"]) == {"chat_template": expected}
    assert ("chat_template.jinja" in files) is (where in ("jinja", "both"))
    # With it the router would render DeepSeek's own format.
    assert "architectures" not in json.loads(files["config.json"])
    assert json.loads(files["config.json"])["eos_token_id"] == 2


def test_default_template_of_a_list_is_the_one_of_that_name(model_dir: Path) -> None:
    put_in_config(
        model_dir,
        [{"name": "rag", "template": "rag"}, {"name": "default", "template": IN_CONFIG}],
    )
    assert default_chat_template(model_dir) == IN_CONFIG
    put_in_config(model_dir, [{"name": "rag", "template": "rag"}])
    assert default_chat_template(model_dir) is None


@pytest.mark.parametrize("kind", ["string", "list", "jinja"])
def test_default_template_is_the_one_of_transformers(model_dir: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    if kind != "list":
        put_in_config(model_dir, IN_CONFIG)
    else:
        put_in_config(
            model_dir,
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": IN_CONFIG}],
        )
    if kind == "jinja":
        (model_dir / "chat_template.jinja").write_text(IN_JINJA)
    theirs = AutoTokenizer.from_pretrained(model_dir).get_chat_template()
    assert default_chat_template(model_dir) == theirs


def test_further_templates_go_along(model_dir: Path) -> None:
    (model_dir / "tool_chat.jinja").write_text("tools")
    files = unpacked(model_dir)
    assert files["tool_chat.jinja"] == b"tools"
    assert "chat_template.json" not in files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"not json"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("chat_template.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_file_is_told_at_the_start(model_dir: Path, name: str, content: bytes) -> None:
    (model_dir / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        Tokenizer.from_dir(model_dir)
