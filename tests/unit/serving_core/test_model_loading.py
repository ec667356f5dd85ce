"""Loading checkpoints: shards, dtypes, fingerprints, and every way to be broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving_core.errors import CheckpointError
from serving_core.model.loading import load_model
from serving_core.model.moe import MoeMlp
from serving_core.model.transformer import CausalLM

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]
NUM_LAYERS = 4


@pytest.fixture
def variant(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes a copy of a tiny checkpoint with changed tensors and configuration keys."""

    def write(
        change: Change | None = None, *, of: str = "ds_plain", to: str = "variant", **keys: Any
    ) -> Path:
        directory = tmp_path / to
        shutil.copytree(tiny_checkpoints[of], directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **keys}))
        tensors = load_file(directory / "model.safetensors")
        if change is not None:
            change(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return write


def all_tensors(model: CausalLM) -> Tensors:
    """Every weight of a model, by a path of attribute names."""
    found: Tensors = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                visit(f"{path}.{index}", item)
        elif hasattr(type(value), "__dataclass_fields__"):
            for name in type(value).__dataclass_fields__:
                visit(f"{path}.{name}", getattr(value, name))

    visit("", model)
    return found


def test_load_sharded_equals_single_file(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    from tests.support.checkpoints import write_tiny_checkpoint

    sharded_dir = write_tiny_checkpoint("glm_shared", tmp_path / "sharded", max_shard_size="600KB")
    assert not (sharded_dir / "model.safetensors").exists()
    assert len(list(sharded_dir.glob("model-*.safetensors"))) > 3
    sharded, single = load_model(sharded_dir), load_model(tiny_checkpoints["glm_shared"])
    expected = all_tensors(single)
    assert all_tensors(sharded).keys() == expected.keys()
    for name, tensor in all_tensors(sharded).items():
        assert torch.equal(tensor, expected[name]), name
    assert sharded.fingerprint == single.fingerprint


def test_load_layer_without_indexer_has_no_index_key(tiny_checkpoints: Mapping[str, Path]) -> None:
    model = load_model(tiny_checkpoints["glm_shared"])
    assert [layer.attention.indexer is not None for layer in model.layers] == [
        True,
        True,
        False,
        True,
    ]
    with_key, without = ("latent", "rope", "index_key"), ("latent", "rope")
    names = [tuple(part.name for part in layer) for layer in model.kv_components]
    assert names == [with_key, with_key, without, with_key]


def test_load_bfloat16_keeps_the_router_in_float32(tiny_checkpoints: Mapping[str, Path]) -> None:
    model = load_model(tiny_checkpoints["ds_plain"], dtype=torch.bfloat16)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    in_float32 = {mlp.router.weight, mlp.router.correction_bias, model.rope.cos, model.rope.sin}
    assert {tensor.dtype for tensor in in_float32} == {torch.float32}
    others = all_tensors(model)
    for name, tensor in others.items():
        if ".router." not in name and ".rope." not in name:
            assert tensor.dtype == torch.bfloat16, name


def test_load_float16_file_is_widened_exactly(variant: Callable[..., Path]) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].half()

    model = load_model(variant(narrow))
    stored = load_file(variant(narrow, to="again") / "model.safetensors")
    assert torch.equal(model.embedding, stored["model.embed_tokens.weight"].float())


def test_load_dtype_that_is_not_implemented_is_refused(
    tiny_checkpoints: Mapping[str, Path],
) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        load_model(tiny_checkpoints["ds_plain"], dtype=torch.float64)


def test_load_weights_are_copies_of_the_file(variant: Callable[..., Path]) -> None:
    directory = variant()
    model = load_model(directory)
    before = {name: tensor.clone() for name, tensor in all_tensors(model).items()}
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[len(content) // 4 :] = bytes(len(content) - len(content) // 4)
    (directory / "model.safetensors").write_bytes(content)
    for name, tensor in all_tensors(model).items():
        assert torch.equal(tensor, before[name]), name


def test_load_mtp_layers_and_rope_buffers_are_ignored(
    variant: Callable[..., Path], tiny_checkpoints: Mapping[str, Path]
) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"model.layers.{NUM_LAYERS}.eh_proj.weight"] = torch.ones(4)
        tensors[f"model.layers.{NUM_LAYERS + 1}.enorm.weight"] = torch.ones(4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    model = load_model(variant(add, num_nextn_predict_layers=2))
    expected = all_tensors(load_model(tiny_checkpoints["ds_plain"]))
    for name, tensor in all_tensors(model).items():
        assert torch.equal(tensor, expected[name]), name


def test_load_tied_head_is_the_embedding(variant: Callable[..., Path]) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    model = load_model(variant(drop, tie_word_embeddings=True))
    assert model.lm_head is model.embedding

    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load_model(variant(copy, to="stored_too", tie_word_embeddings=True))


def test_load_tied_head_that_differs_is_refused(variant: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(variant(tie_word_embeddings=True))
    assert caught.value.field == "lm_head.weight"


def test_load_progress_goes_to_stderr_when_asked(
    tiny_checkpoints: Mapping[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    load_model(tiny_checkpoints["ds_plain"])
    assert capfd.readouterr() == ("", "")
    load_model(tiny_checkpoints["ds_plain"], progress=True)
    output, errors = capfd.readouterr()
    assert output == ""
    assert "ds_plain" in errors


FIRST_EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"
INDEX_KEY_NORM = "model.layers.2.self_attn.indexer.k_norm.bias"
CORRECTION = "model.layers.3.mlp.gate.e_score_correction_bias"


def drop(name: str) -> Change:
    """Removes a tensor."""

    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def put(name: str, tensor: Tensor) -> Change:
    """Adds or replaces a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (drop("model.embed_tokens.weight"), "model.embed_tokens.weight", "missing"),
        (drop("lm_head.weight"), "lm_head.weight", "missing"),
        (drop(FIRST_EXPERT), FIRST_EXPERT, "missing"),
        (drop(INDEX_KEY_NORM), INDEX_KEY_NORM, "missing"),
        (drop(CORRECTION), CORRECTION, "missing"),
        (put(FIRST_EXPERT, torch.ones(64, 128)), FIRST_EXPERT, "shape [64, 128]"),
        (put(CORRECTION, torch.ones(4)), CORRECTION, "shape [4]"),
        (put("model.norm.weight", torch.ones(1, 128)), "model.norm.weight", "shape [1, 128]"),
        (
            put(FIRST_EXPERT, torch.ones(128, 64, dtype=torch.float8_e4m3fn)),
            FIRST_EXPERT,
            "float8_e4m3fn",
        ),
        (put(FIRST_EXPERT, torch.ones(128, 64, dtype=torch.int8)), FIRST_EXPERT, "int8"),
        (put(f"{FIRST_EXPERT}_scale_inv", torch.ones(1)), f"{FIRST_EXPERT}_scale_inv", "present"),
        (
            put("model.layers.0.self_attn.q_a_proj.bias", torch.ones(64)),
            "model.layers.0.self_attn.q_a_proj.bias",
            "present",
        ),
        (
            put(f"model.layers.{NUM_LAYERS + 1}.enorm.weight", torch.ones(4)),
            f"model.layers.{NUM_LAYERS + 1}.enorm.weight",
            "present",
        ),
    ],
)
def test_load_broken_tensor_is_refused_by_name(
    variant: Callable[..., Path], change: Change, field: str, value: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(variant(change))
    assert caught.value.field == field
    assert caught.value.value == value
    assert caught.value.limit


def test_load_indexer_of_a_shared_layer_is_refused(variant: Callable[..., Path]) -> None:
    name = "model.layers.2.self_attn.indexer.wk.weight"
    with pytest.raises(CheckpointError) as caught:
        load_model(variant(put(name, torch.ones(32, 128)), of="glm_shared"))
    assert caught.value.field == name


@pytest.mark.parametrize("cut", [4, 1000, -1])
def test_load_truncated_file_is_refused(variant: Callable[..., Path], cut: int) -> None:
    path = variant() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError) as caught:
        load_model(path.parent)
    assert caught.value.field == "model.safetensors"


def test_load_directory_without_weights_is_refused(variant: Callable[..., Path]) -> None:
    directory = variant()
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert caught.value.field == "model.safetensors"
    with pytest.raises(CheckpointError) as caught:
        load_model(directory / "nowhere")
    assert caught.value.field == "config.json"


@pytest.mark.parametrize(
    ("index", "field"),
    [
        ({}, "model.safetensors.index.json: weight_map"),
        ({"weight_map": {}}, "model.safetensors.index.json: weight_map"),
        ({"weight_map": {"a": "../b.safetensors"}}, "model.safetensors.index.json: a"),
        ({"weight_map": {"a": "/etc/b.safetensors"}}, "model.safetensors.index.json: a"),
        ({"weight_map": {"a": "b.bin"}}, "model.safetensors.index.json: a"),
        ({"weight_map": {"a": 1}}, "model.safetensors.index.json: a"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"a": "shard.safetensors"}}, "a"),
    ],
)
def test_load_broken_index_is_refused_by_name(
    variant: Callable[..., Path], index: dict[str, Any], field: str
) -> None:
    directory = variant()
    (directory / "model.safetensors").rename(directory / "shard.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert caught.value.field == field


def test_fingerprint_is_stable_over_copies(
    variant: Callable[..., Path], tiny_checkpoints: Mapping[str, Path]
) -> None:
    original = load_model(tiny_checkpoints["ds_plain"])
    assert load_model(variant()).fingerprint == original.fingerprint
    assert len(original.fingerprint) == 64


@pytest.mark.parametrize("name", [FIRST_EXPERT, INDEX_KEY_NORM, CORRECTION, "lm_head.weight"])
def test_fingerprint_differs_with_one_byte(
    name: str, variant: Callable[..., Path], tiny_checkpoints: Mapping[str, Path]
) -> None:
    def flip(tensors: Tensors) -> None:
        tensors[name].view(-1).view(torch.uint8)[-1] ^= 1

    original = load_model(tiny_checkpoints["ds_plain"])
    assert load_model(variant(flip)).fingerprint != original.fingerprint


def test_fingerprint_differs_with_configuration_dtype_and_swapped_tensors(
    variant: Callable[..., Path], tiny_checkpoints: Mapping[str, Path]
) -> None:
    def swap(tensors: Tensors) -> None:
        one, other = "input_layernorm.weight", "post_attention_layernorm.weight"
        one, other = f"model.layers.0.{one}", f"model.layers.0.{other}"
        tensors[one], tensors[other] = tensors[other], tensors[one]

    plain = tiny_checkpoints["ds_plain"]
    fingerprints = {
        load_model(plain).fingerprint,
        load_model(plain, dtype=torch.bfloat16).fingerprint,
        load_model(variant(swap, to="swapped")).fingerprint,
        load_model(variant(to="topk", index_topk=31)).fingerprint,
        load_model(variant(to="scaling", routed_scaling_factor=1.0)).fingerprint,
    }
    assert len(fingerprints) == 5
