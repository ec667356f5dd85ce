"""A model's configuration, read strictly from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from attention_core.shape import AttentionShape, IndexerShape
from serving_core.errors import CheckpointError
from serving_core.model.config_fields import ConfigFields, read_json_object
from serving_core.model.deepseek_v32 import DEEPSEEK_V32
from serving_core.model.family import ModelFamily
from serving_core.model.glm_moe_dsa import GLM_MOE_DSA
from serving_core.model.rope_config import RopeConfig, read_rope_config

FAMILIES = MappingProxyType({family.model_type: family for family in (DEEPSEEK_V32, GLM_MOE_DSA)})
DTYPES = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
# The released models train and run these norms with this epsilon, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6

# Keys that change no number in inference: training, bookkeeping, and what is derived from others.
HARMLESS_KEYS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "aux_loss_alpha",
        "auto_map",
        "chunk_size_feed_forward",
        "ep_size",
        "head_dim",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "tokenizer_class",
        "transformers_version",
        "use_cache",
    }
)
_FIXED_KEYS = MappingProxyType(
    {
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "quantization_config": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A mixture-of-experts layer.

    Attributes:
        num_experts: routed experts.
        experts_per_token: routed experts that each token goes to.
        intermediate_size: width of one expert.
        num_shared_experts: experts that every token goes to, fused into one of their joint width.
        num_groups: groups that the router cuts the experts into, in order.
        groups_per_token: groups that a token may pick experts from.
        normalize_weights: whether the chosen experts' scores are divided by their sum.
        scaling_factor: factor on the routed experts' weights.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    num_groups: int
    groups_per_token: int
    normalize_weights: bool
    scaling_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model but its weights.

    Attributes:
        model_type: the family's name in config.json.
        dtype: dtype of weights, activations and KV.
        eos_token_ids: tokens that end a sequence, of config.json and generation_config.json.
        bos_token_id, pad_token_id: None when the model has none.
        attention: sizes of an attention layer; the softmax scale has yarn's factor in it.
        has_indexer: for each layer, whether it has its own indexer and index-key cache. A layer
            without one uses the top-k of the last layer that has one.
        is_sparse: for each layer, whether its MLP is a mixture of experts.
        intermediate_size: width of a dense layer's MLP.
        norm_eps: epsilon of the layer norms (not of the latent norms).
        num_mtp_layers: multi-token-prediction layers in the checkpoint, which are not built.
    """

    model_type: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    attention: AttentionShape
    has_indexer: tuple[bool, ...]
    rope: RopeConfig
    is_sparse: tuple[bool, ...]
    intermediate_size: int
    moe: MoeShape
    norm_eps: float
    tie_word_embeddings: bool
    num_mtp_layers: int

    def canonical_json(self) -> str:
        """One text for equal configurations and different texts for different ones."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=_jsonable)


def _jsonable(value: object) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and, where there is one, the end tokens of generation_config.json.

    Raises:
        CheckpointError: names the key that is missing, out of range, unknown, or set to something
            that is not implemented.
    """
    content = read_json_object(model_dir / "config.json")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            field="model_type", value=model_type, limit=f"one of {sorted(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    fields = ConfigFields(content, family.defaults)
    fields.required("model_type")
    config = _read_config(fields, family)
    fields.finish(harmless=HARMLESS_KEYS)
    return dataclasses.replace(config, eos_token_ids=_end_tokens(model_dir, config))


def _read_config(fields: ConfigFields, family: ModelFamily) -> ModelConfig:
    for key, implemented in _FIXED_KEYS.items():
        fields.fixed(key, implemented)
    num_layers = fields.integer("num_hidden_layers")
    vocab_size = fields.integer("vocab_size")
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope = read_rope_config(fields, max_position_embeddings)
    fields.words("layer_types", ("indexed_attention",))
    num_mtp_layers = 0
    if fields.optional("num_nextn_predict_layers") is not None:
        num_mtp_layers = fields.integer("num_nextn_predict_layers", minimum=0)
    return ModelConfig(
        model_type=family.model_type,
        dtype=_dtype(fields),
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        max_position_embeddings=max_position_embeddings,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=fields.token_id("bos_token_id", vocab_size),
        pad_token_id=fields.token_id("pad_token_id", vocab_size),
        attention=_attention(fields, family, rope),
        has_indexer=family.read_indexer_layers(fields, num_layers),
        rope=rope,
        is_sparse=_sparse_layers(fields, num_layers),
        intermediate_size=fields.integer("intermediate_size"),
        moe=_moe(fields),
        norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        num_mtp_layers=num_mtp_layers,
    )


def _attention(fields: ConfigFields, family: ModelFamily, rope: RopeConfig) -> AttentionShape:
    num_heads = fields.integer("num_attention_heads")
    fields.fixed("num_key_value_heads", num_heads)
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.fixed("qk_head_dim", nope + rope_dim)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", rope_dim, "an even number")
    index_head_dim = fields.integer("index_head_dim")
    if index_head_dim < rope_dim:
        raise fields.error("index_head_dim", index_head_dim, f">= qk_rope_head_dim {rope_dim}")
    interleaved = family.indexer_rope_style.name == "INTERLEAVED"
    fields.fixed("indexer_rope_interleave", interleaved)
    return AttentionShape(
        hidden_size=fields.integer("hidden_size"),
        num_heads=num_heads,
        q_lora_rank=fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        softmax_scale=(nope + rope_dim) ** -0.5 * rope.softmax_factor,
        norm_eps=LATENT_NORM_EPS,
        indexer=IndexerShape(
            num_heads=fields.integer("index_n_heads"),
            head_dim=index_head_dim,
            rope_head_dim=rope_dim,
            topk=fields.integer("index_topk"),
            rope_style=family.indexer_rope_style,
            norm_eps=INDEX_NORM_EPS,
        ),
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    num_dense = min(fields.integer("first_k_dense_replace", minimum=0), num_layers)
    listed = fields.words("mlp_layer_types", ("dense", "sparse"))
    if listed is None:
        return tuple(layer >= num_dense for layer in range(num_layers))
    if len(listed) != num_layers:
        raise fields.error("mlp_layer_types", f"{len(listed)} entries", f"{num_layers} entries")
    return tuple(kind == "sparse" for kind in listed)


def _moe(fields: ConfigFields) -> MoeShape:
    moe = MoeShape(
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_shared_experts=fields.integer("n_shared_experts"),
        num_groups=fields.integer("n_group"),
        groups_per_token=fields.integer("topk_group"),
        normalize_weights=fields.boolean("norm_topk_prob"),
        scaling_factor=fields.number("routed_scaling_factor"),
    )
    group_size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or group_size < 2:
        limit = f"groups of equal size >= 2 out of {moe.num_experts} experts"
        raise fields.error("n_group", moe.num_groups, limit)
    if moe.groups_per_token > moe.num_groups:
        raise fields.error("topk_group", moe.groups_per_token, f"<= n_group {moe.num_groups}")
    selectable = moe.groups_per_token * group_size
    if moe.experts_per_token > selectable:
        limit = f"<= {selectable}, the experts in topk_group groups"
        raise fields.error("num_experts_per_tok", moe.experts_per_token, limit)
    return moe


def _dtype(fields: ConfigFields) -> torch.dtype:
    """`dtype`, or `torch_dtype` as it was called before; float32 when neither is given."""
    old, new = fields.optional("torch_dtype"), fields.optional("dtype")
    name = new or old or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise fields.error("dtype", name, f"one of {sorted(DTYPES)}")
    return DTYPES[name]


def _end_tokens(model_dir: Path, config: ModelConfig) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    if not path.exists():
        return config.eos_token_ids
    fields = ConfigFields(read_json_object(path), {}, prefix="generation_config.json: ")
    more = fields.token_ids("eos_token_id", config.vocab_size)
    return tuple(dict.fromkeys(config.eos_token_ids + more))
