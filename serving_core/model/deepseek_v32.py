"""The DeepSeek-V3.2 family: an indexer in every layer, with half-split rope."""

from __future__ import annotations

from types import MappingProxyType

from attention_core.shape import RopeStyle
from serving_core.model.config_fields import ConfigFields
from serving_core.model.family import ModelFamily


def _every_layer(_fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


DEEPSEEK_V32 = ModelFamily(
    model_type="deepseek_v32",
    defaults=MappingProxyType(
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 163840,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
    ),
    indexer_rope_style=RopeStyle.HALF_SPLIT,
    read_indexer_layers=_every_layer,
)
