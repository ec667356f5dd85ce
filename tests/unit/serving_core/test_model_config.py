"""Reading config.json: defaults, old spellings, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_core.shape import RopeStyle
from serving_core.errors import CheckpointError
from serving_core.model.config import ModelConfig, load_model_config

ReadConfig = Callable[..., ModelConfig]


@pytest.fixture
def read_config(tmp_path: Path) -> ReadConfig:
    """Reads a config.json with the given content."""

    def read(**content: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return load_model_config(tmp_path)

    return read


def test_config_deepseek_defaults_are_those_of_the_release(read_config: ReadConfig) -> None:
    config = read_config(model_type="deepseek_v32")
    shape, indexer = config.attention, config.attention.indexer
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (129280, 7168, 61)
    assert (shape.num_heads, shape.q_lora_rank, shape.kv_lora_rank) == (128, 1536, 512)
    assert (shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim) == (128, 64, 128)
    assert (indexer.num_heads, indexer.head_dim, indexer.topk) == (64, 128, 2048)
    assert indexer.rope_style is RopeStyle.HALF_SPLIT
    assert config.has_indexer == (True,) * 61
    assert config.is_sparse == (False,) * 3 + (True,) * 58
    assert (config.moe.num_experts, config.moe.experts_per_token) == (256, 8)
    assert (config.moe.num_groups, config.moe.groups_per_token) == (8, 4)
    assert (config.norm_eps, shape.norm_eps, indexer.norm_eps) == (1e-6, 1e-6, 1e-6)
    assert shape.softmax_scale == pytest.approx(192**-0.5)
    assert (config.rope.theta, config.rope.scaling) == (10_000.0, None)
    assert config.dtype == torch.float32
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (0, (1,), None)


def test_config_glm_defaults_are_those_of_the_release(read_config: ReadConfig) -> None:
    config = read_config(model_type="glm_moe_dsa")
    shape, indexer = config.attention, config.attention.indexer
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (154880, 6144, 78)
    assert (shape.num_heads, shape.q_lora_rank, shape.v_head_dim) == (64, 2048, 256)
    assert (shape.qk_nope_head_dim, indexer.num_heads) == (192, 32)
    assert indexer.rope_style is RopeStyle.INTERLEAVED
    assert config.has_indexer == (True,) * 78
    assert (config.moe.num_groups, config.moe.groups_per_token) == (1, 1)
    # The latent norms keep their own epsilon, as in the released code.
    assert (config.norm_eps, shape.norm_eps) == (1e-5, 1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "FFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFS"),
        ({"index_topk_freq": 0}, "FFFFFFFF"),
        ({"index_topk_pattern": "FSSFFSSS"}, "FSSFFSSS"),
        ({"index_topk_pattern": ["full", "shared"] * 4}, "FSFSFSFS"),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 5}, "FFFSSSSS"),
        # Entries past the last layer are those of MTP layers.
        ({"indexer_types": ["full", "shared"] * 4 + ["full"]}, "FSFSFSFS"),
        ({"indexer_types": ["full"] * 8, "index_topk_freq": 4}, "FFFFFFFF"),
        ({"index_topk_pattern": "FSFSFSFS", "index_topk_freq": 1}, "FSFSFSFS"),
    ],
)
def test_config_glm_indexer_layers_follow_their_keys(
    read_config: ReadConfig, keys: dict[str, Any], expected: str
) -> None:
    config = read_config(model_type="glm_moe_dsa", num_hidden_layers=8, **keys)
    assert config.has_indexer == tuple(letter == "F" for letter in expected)


YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **YARN}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "rope_theta": 5e4, **YARN}},
    ],
)
def test_config_old_and_new_rope_keys_mean_the_same(
    read_config: ReadConfig, keys: dict[str, Any]
) -> None:
    config = read_config(model_type="deepseek_v32", **keys)
    assert config.rope.theta == 5e4
    assert config.rope.scaling is not None
    assert config.rope.scaling.factor == 40.0
    assert config.rope.scaling.original_max_position_embeddings == 4096
    mscale = 0.1 * math.log(40) + 1
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * mscale**2)


def test_config_yarn_without_factor_takes_it_from_the_lengths(read_config: ReadConfig) -> None:
    config = read_config(
        model_type="deepseek_v32",
        max_position_embeddings=8192,
        original_max_position_embeddings=2048,
        rope_scaling={"type": "yarn", "original_max_position_embeddings": 4096},
    )
    assert config.rope.scaling is not None
    # Outside the rope parameters the pre-training length takes precedence.
    assert config.rope.scaling.original_max_position_embeddings == 2048
    assert config.rope.scaling.factor == 4.0
    # Without mscale_all_dim the softmax scale stays as it is.
    assert config.attention.softmax_scale == pytest.approx(192**-0.5)


def test_config_keys_of_released_checkpoints_are_accepted(read_config: ReadConfig) -> None:
    config = read_config(
        model_type="deepseek_v32",
        architectures=["DeepseekV32ForCausalLM"],
        aux_loss_alpha=0.001,
        ep_size=1,
        moe_layer_freq=1,
        num_nextn_predict_layers=1,
        scoring_func="sigmoid",
        seq_aux=True,
        topk_method="noaux_tc",
        torch_dtype="bfloat16",
        quantization_config=None,
        some_switch_of_the_future=False,
        _note_of_some_library="x",
    )
    assert config.num_mtp_layers == 1
    assert config.dtype == torch.bfloat16


def test_config_end_tokens_are_joined_with_the_generation_config(
    read_config: ReadConfig, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2, 9], "temperature": 0.6})
    )
    config = read_config(model_type="deepseek_v32", eos_token_id=[2, 5], pad_token_id=-1)
    assert config.eos_token_ids == (2, 5, 7, 9)
    assert config.pad_token_id is None


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"qk_head_dim": 64}, "qk_head_dim"),
        ({"layer_types": ["full_attention"] * 61}, "layer_types[0]"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types[1]"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "7168"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 256}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"eos_token_id": 129280}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"bos_token_id": [0, 1]}, "bos_token_id"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "short_factor": [1]}}, "rope_scaling.short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_experts": 4}, "num_experts"),
        ({"indexer_types": ["full"] * 61}, "indexer_types"),
    ],
)
def test_config_key_that_matters_is_refused_by_name(
    read_config: ReadConfig, keys: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(**{"model_type": "deepseek_v32", **keys})
    assert caught.value.field == field
    assert caught.value.limit


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"indexer_types": ["shared", "full"]}, "indexer_types[0]"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": ["full", "none"]}, "indexer_types[1]"),
        ({"index_topk_pattern": "FX"}, "index_topk_pattern"),
        ({"index_topk_pattern": "F"}, "index_topk_pattern"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq[0]"),
        ({"index_topk_freq": -1}, "index_topk_freq"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_config_glm_key_that_matters_is_refused_by_name(
    read_config: ReadConfig, keys: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(model_type="glm_moe_dsa", num_hidden_layers=2, **keys)
    assert caught.value.field == field


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{", b"\xff"])
def test_config_file_that_is_no_object_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(tmp_path)
    assert caught.value.field == "config.json"


def test_config_canonical_json_differs_with_any_key(read_config: ReadConfig) -> None:
    base = read_config(model_type="deepseek_v32").canonical_json()
    assert read_config(model_type="deepseek_v32").canonical_json() == base
    changes: list[dict[str, Any]] = [
        {"index_topk": 1024},
        {"routed_scaling_factor": 1.0},
        {"rope_theta": 5e4},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"torch_dtype": "bfloat16"},
        {"norm_topk_prob": False},
        {"eos_token_id": 3},
        {"first_k_dense_replace": 2},
    ]
    texts = {
        read_config(model_type="deepseek_v32", **change).canonical_json() for change in changes
    }
    assert len(texts) == len(changes)
    assert base not in texts
