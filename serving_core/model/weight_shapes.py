"""The tensors that a checkpoint must have: names and shapes as Hugging Face stores them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from serving_core.errors import CheckpointError
from serving_core.model.checkpoint import Checkpoint
from serving_core.model.config import ModelConfig

Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this configuration reads, with its shape."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = table
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (config.hidden_size,)
        shapes |= {prefix + name: shape for name, shape in _attention_shapes(config, layer)}
        shapes |= {prefix + name: shape for name, shape in _mlp_shapes(config, layer)}
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    shape, width = config.attention, config.hidden_size
    heads, rope = shape.num_heads, shape.qk_rope_head_dim
    yield "self_attn.q_a_proj.weight", (shape.q_lora_rank, width)
    yield "self_attn.q_a_layernorm.weight", (shape.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * shape.qk_head_dim, shape.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (shape.kv_lora_rank + rope, width)
    yield "self_attn.kv_a_layernorm.weight", (shape.kv_lora_rank,)
    per_head = shape.qk_nope_head_dim + shape.v_head_dim
    yield "self_attn.kv_b_proj.weight", (heads * per_head, shape.kv_lora_rank)
    yield "self_attn.o_proj.weight", (width, heads * shape.v_head_dim)
    if config.has_indexer[layer]:
        indexer = shape.indexer
        index_width = indexer.num_heads * indexer.head_dim
        yield "self_attn.indexer.wq_b.weight", (index_width, shape.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (indexer.head_dim, width)
        yield "self_attn.indexer.k_norm.weight", (indexer.head_dim,)
        yield "self_attn.indexer.k_norm.bias", (indexer.head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (indexer.num_heads, width)


def _mlp_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    moe, width = config.moe, config.hidden_size
    if not config.is_sparse[layer]:
        yield from _gated_mlp_shapes("mlp.", width, config.intermediate_size)
        return
    yield "mlp.gate.weight", (moe.num_experts, width)
    yield "mlp.gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _gated_mlp_shapes(f"mlp.experts.{expert}.", width, moe.intermediate_size)
    shared_width = moe.num_shared_experts * moe.intermediate_size
    yield from _gated_mlp_shapes("mlp.shared_experts.", width, shared_width)


def _gated_mlp_shapes(
    prefix: str, width: int, intermediate_size: int
) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}gate_proj.weight", (intermediate_size, width)
    yield f"{prefix}up_proj.weight", (intermediate_size, width)
    yield f"{prefix}down_proj.weight", (width, intermediate_size)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compares the checkpoint's names and shapes with the configuration; reads no weights.

    Raises:
        CheckpointError: names a tensor that is missing, misshapen, or not part of the model.
    """
    expected = weight_shapes(config)
    for name, shape in expected.items():
        if name not in checkpoint.names:
            raise CheckpointError(field=name, value="missing", limit=f"shape {list(shape)}")
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                field=name,
                value=f"shape {list(checkpoint.shape(name))}",
                limit=f"shape {list(shape)}",
            )
    for name in sorted(checkpoint.names):
        if name not in expected and not _may_be_ignored(name, config):
            raise CheckpointError(
                field=name, value="present", limit="tensors that the configuration implies"
            )


def _may_be_ignored(name: str, config: ModelConfig) -> bool:
    """MTP layers, which follow the last layer; rope buffers of old checkpoints; a tied head."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == LM_HEAD:
        return config.tie_word_embeddings
    match = _LAYER_NAME.match(name)
    past_last = int(match.group(1)) - config.num_layers if match else -1
    # A configuration that was saved anew may have lost the number of its MTP layers.
    return 0 <= past_last < max(config.num_mtp_layers, 1)
