"""Rope parameters of a checkpoint, in today's form and in the older one."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from attention_core.rope import YarnScaling, yarn_mscale
from serving_core.model.config_fields import ConfigFields

DEFAULT_THETA = 10_000.0
_YARN_DEFAULTS = MappingProxyType({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a model.

    Attributes:
        theta: base of the frequencies.
        scaling: yarn, or None for plain rope.
    """

    theta: float
    scaling: YarnScaling | None

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale: the square of yarn's mscale for `mscale_all_dim`.

        Source: the released DeepSeek-V3 inference code and `yarn_apply_mscale` of transformers.
        """
        if self.scaling is None or not self.scaling.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.scaling.factor, self.scaling.mscale_all_dim) ** 2


def read_rope_config(fields: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    """Reads the rope keys of config.json.

    Today's form is `rope_parameters`; the older one is `rope_scaling` beside `rope_theta`. A
    `rope_scaling` that is not empty wins over `rope_parameters`, and a `rope_theta` inside either
    wins over the one beside it, as in transformers.

    Raises:
        CheckpointError: a rope type or parameter is not implemented, or a value out of range.
    """
    fields.fixed("partial_rotary_factor", 1.0)
    old, new = fields.optional("rope_scaling"), fields.optional("rope_parameters")
    key, content = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    if not isinstance(content, dict):
        raise fields.error(key, content, "an object")
    outer_theta = fields.optional("rope_theta")
    pretrained = fields.optional("original_max_position_embeddings")
    theta_default = {"rope_theta": DEFAULT_THETA if outer_theta is None else outer_theta}
    if pretrained is not None:
        # Written outside the rope parameters it takes precedence, as in transformers.
        content = {**content, "original_max_position_embeddings": pretrained}
    inner = ConfigFields(content, _YARN_DEFAULTS | theta_default, prefix=f"{key}.")
    rope = _read(inner, max_position_embeddings)
    inner.finish(harmless=())
    return rope


def _read(fields: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    theta = fields.number("rope_theta", minimum=1.0)
    fields.fixed("partial_rotary_factor", 1.0)
    old_name, name = fields.optional("type"), fields.optional("rope_type")
    rope_type = name or old_name or "default"
    pretrained = fields.optional("original_max_position_embeddings")
    if rope_type == "default":
        return RopeConfig(theta=theta, scaling=None)
    if rope_type != "yarn":
        raise fields.error("rope_type", rope_type, "'default' or 'yarn'")
    original = max_position_embeddings
    if pretrained is not None:
        original = fields.integer("original_max_position_embeddings")
    factor = max_position_embeddings / original
    if fields.optional("factor") is not None:
        factor = fields.number("factor")
    return RopeConfig(
        theta=theta,
        scaling=YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=fields.number("beta_fast"),
            beta_slow=fields.number("beta_slow"),
            mscale=_number_or_none(fields, "mscale"),
            mscale_all_dim=_number_or_none(fields, "mscale_all_dim"),
            attention_factor=_number_or_none(fields, "attention_factor"),
            truncate=fields.boolean("truncate"),
        ),
    )


def _number_or_none(fields: ConfigFields, key: str) -> float | None:
    """Absent, null and 0 all mean that the factor is not used."""
    return fields.number(key) if fields.optional(key) else None
