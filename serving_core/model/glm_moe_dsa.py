"""The GLM-MoE-DSA family: interleaved indexer rope, and layers that reuse an earlier top-k."""

from __future__ import annotations

from types import MappingProxyType

from attention_core.shape import RopeStyle
from serving_core.model.config_fields import ConfigFields
from serving_core.model.family import ModelFamily

_FULL, _SHARED = "full", "shared"


def _indexer_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """From `indexer_types`, else `index_topk_pattern`, else the frequency and its offset."""
    listed = fields.words("indexer_types", (_FULL, _SHARED))
    pattern = _pattern(fields)
    scheduled = _schedule(fields, num_layers)
    key, types = "index_topk_freq", scheduled
    if listed is not None:
        key, types = "indexer_types", listed
    elif pattern is not None:
        key, types = "index_topk_pattern", pattern
    # Entries past the last layer belong to MTP layers, which are not built.
    if len(types) < num_layers:
        raise fields.error(key, f"{len(types)} entries", f"one entry a layer, {num_layers}")
    if types[0] != _FULL:
        raise fields.error(f"{key}[0]", types[0], "full: the first layer has nothing to share")
    return tuple(kind == _FULL for kind in types[:num_layers])


def _pattern(fields: ConfigFields) -> tuple[str, ...] | None:
    pattern = fields.optional("index_topk_pattern")
    if not isinstance(pattern, str):
        return fields.words("index_topk_pattern", (_FULL, _SHARED))
    if set(pattern) - {"F", "S"}:
        raise fields.error("index_topk_pattern", pattern, "letters F (full) and S (shared)")
    return tuple(_FULL if letter == "F" else _SHARED for letter in pattern)


def _schedule(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    frequency = max(fields.integer("index_topk_freq", minimum=0), 1)
    offset = fields.integer("index_skip_topk_offset", minimum=0)
    return tuple(
        _FULL if max(layer - offset + 1, 0) % frequency == 0 else _SHARED
        for layer in range(num_layers)
    )


GLM_MOE_DSA = ModelFamily(
    model_type="glm_moe_dsa",
    defaults=MappingProxyType(
        {
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk_freq": 1,
            "index_skip_topk_offset": 2,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
    ),
    indexer_rope_style=RopeStyle.INTERLEAVED,
    read_indexer_layers=_indexer_layers,
)
