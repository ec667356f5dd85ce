"""What distinguishes one model family: defaults of its configuration and its indexer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attention_core.shape import RopeStyle
from serving_core.model.config_fields import ConfigFields


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family.

    Attributes:
        model_type: the value of `model_type` in config.json.
        defaults: values of config.json keys that a checkpoint may leave out.
        indexer_rope_style: how the indexer's rope pairs lie.
        read_indexer_layers: (fields, num_layers) -> for each layer whether it has its own indexer.
    """

    model_type: str
    defaults: Mapping[str, object]
    indexer_rope_style: RopeStyle
    read_indexer_layers: Callable[[ConfigFields, int], tuple[bool, ...]]
