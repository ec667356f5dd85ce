"""Tiny random checkpoints of both DSA families, written through transformers' `save_pretrained`.

The sizes follow the rules that make transformers a token-exact oracle: at least 8 index heads (with
fewer, whole index scores are exactly zero and ties decide), fp32, an index_topk far below the
prompt lengths, and at least two experts in a router group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

VOCAB_SIZE = 512
INDEX_TOPK = 32
NUM_LAYERS = 4
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
NUM_SPECIAL_TOKENS = 3

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": INDEX_TOPK,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_PLAIN_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
# mscale differs from mscale_all_dim, so that the factor on cos and sin is not 1 by accident.
_YARN_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
_DEEPSEEK_GROUPS: Mapping[str, Any] = {"n_group": 4, "topk_group": 2}

CHECKPOINT_NAMES = ("ds_plain", "ds_yarn", "glm_plain", "glm_shared")

# What the chain checkpoint says after any prompt, over and over: no byte comes twice, characters of
# one to four bytes, and one token a byte.
CHAIN_TEXT = "aéb数c\N{GRINNING FACE}d"
# After the layers' norm a one-hot row has the length sqrt(hidden_size), 11.3: the next token of the
# chain leads by 2.8, which greedy decoding always takes and sampling at temperature 1 rarely.
_CHAIN_LEAD = 0.25


def write_tiny_checkpoint(
    name: str, directory: Path, *, max_shard_size: str = "1GB", tokenizer: bool = True
) -> Path:
    """Writes the tiny checkpoint `name` (one of `CHECKPOINT_NAMES`) to `directory`.

    The weights depend on the name alone. A `max_shard_size` below 1 MB gives a sharded checkpoint.
    """
    model = _build(name)
    generator = torch.Generator().manual_seed(1000 + CHECKPOINT_NAMES.index(name))
    _randomise(model, generator)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        write_byte_tokenizer(directory)
    return directory


def write_chain_checkpoint(directory: Path, name: str = "ds_plain") -> Path:
    """Writes a checkpoint that greedily says CHAIN_TEXT, then <eos>, then all of it again.

    The tokens of the text and <eos> follow one another in a ring; any other token is followed by
    the text's first. Attention runs, but what it finds has no weight.
    """
    model = _build(name)
    _randomise(model, torch.Generator().manual_seed(7))
    write_byte_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ring = [*tokenizer.encode(CHAIN_TEXT).ids, EOS_TOKEN_ID]
    assert len(set(ring)) == len(ring)
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for tensor_name, tensor in tensors.items():
            if "o_proj" in tensor_name or "down_proj" in tensor_name:
                tensor.zero_()
        tensors["model.norm.weight"].fill_(1.0)
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        embedding.zero_()
        head.zero_()
        embedding[:, len(ring) - 1] = 1.0  # like <eos>
        for index, token_id in enumerate(ring):
            embedding[token_id] = 0.0
            embedding[token_id, index] = 1.0
            head[ring[(index + 1) % len(ring)], index] = _CHAIN_LEAD
    model.save_pretrained(directory)
    return directory


def _build(name: str) -> torch.nn.Module:
    shape = dict(_SHAPE)
    if name == "ds_plain":
        config = DeepseekV32Config(**shape, **_DEEPSEEK_GROUPS, rope_parameters=dict(_PLAIN_ROPE))
        return DeepseekV32ForCausalLM(config)
    if name == "ds_yarn":
        config = DeepseekV32Config(**shape, **_DEEPSEEK_GROUPS, rope_parameters=dict(_YARN_ROPE))
        return DeepseekV32ForCausalLM(config)
    indexer_types = ["full"] * NUM_LAYERS
    if name == "glm_shared":
        indexer_types = ["full", "full", "shared", "full"]
    glm_config = GlmMoeDsaConfig(
        **shape, rope_parameters=dict(_PLAIN_ROPE), indexer_types=indexer_types
    )
    return GlmMoeDsaForCausalLM(glm_config)


def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of std 1.3 / sqrt(fan_in), norms 1 + 0.2 n, router bias 0.1 n."""

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name]
            if name.endswith("inv_freq"):
                continue
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * normal(tensor.shape))
            elif name.endswith("norm.bias"):
                tensor.copy_(0.2 * normal(tensor.shape))
            elif tensor.dim() == 1:
                tensor.copy_(1 + 0.2 * normal(tensor.shape))
            elif name.endswith("embed_tokens.weight"):
                tensor.copy_(normal(tensor.shape))
            else:
                tensor.copy_(1.3 / tensor.shape[-1] ** 0.5 * normal(tensor.shape))


def write_byte_tokenizer(directory: Path) -> None:
    """Writes a byte-level `tokenizer.json`: three special tokens, then one token a byte."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": PAD_TOKEN_ID, "<bos>": BOS_TOKEN_ID, "<eos>": EOS_TOKEN_ID}
    vocab |= {piece: NUM_SPECIAL_TOKENS + index for index, piece in enumerate(alphabet)}
    # Fillers give every id of the model a text, so that any sampled token can be decoded.
    vocab |= {f"<{index}>": index for index in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
