"""Builds a model from a Hugging Face directory, refusing whatever does not fit."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from attention_core.rope import RopeTable, build_rope_table
from attention_core.weights import IndexerWeights, NativeWeights, split_kv_b
from serving_core.errors import CheckpointError
from serving_core.model.checkpoint import Checkpoint
from serving_core.model.config import DTYPES, ModelConfig, load_model_config
from serving_core.model.mlp import GatedMlp, RmsNorm
from serving_core.model.moe import MoeMlp, RoutedExperts, Router
from serving_core.model.transformer import CausalLM, TransformerLayer
from serving_core.model.weight_shapes import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    check_tensors,
    layer_prefix,
    weight_shapes,
)

_FINGERPRINT_VERSION = "tandem-model-1"


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> CausalLM:
    """Loads a model.

    Args:
        model_dir: config.json beside model.safetensors, or beside shards and their index.
        dtype: dtype of weights, activations and KV; None takes the checkpoint's. The router stays
            fp32 whatever it is.
        device: where the weights go.
        progress: shows a progress bar on stderr.

    Raises:
        CheckpointError: names the file, the key or the tensor that does not fit, what it is, and
            what would have been accepted.
    """
    config = load_model_config(model_dir)
    if dtype is not None:
        if dtype not in DTYPES.values():
            raise CheckpointError(field="dtype", value=dtype, limit=f"one of {sorted(DTYPES)}")
        config = dataclasses.replace(config, dtype=dtype)
    with Checkpoint(model_dir) as checkpoint:
        check_tensors(checkpoint, config)
        num_tensors = len(weight_shapes(config))
        with _progress_bar(model_dir.name, num_tensors, shown=progress) as advance:
            return _build(_WeightReader(checkpoint, config, torch.device(device), advance))


class _WeightReader:
    """Reads tensors of a checkpoint into memory of the model's own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        advance: Callable[[], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.device = device
        self._advance = advance

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in the model's dtype, or in `dtype`.

        Always a copy: a view would let a change of the file change the model, or end the process.
        """
        stored = self.checkpoint.read(name)
        self._advance()
        wanted = self.config.dtype if dtype is None else dtype
        return stored.to(device=self.device, dtype=wanted, copy=True)

    def read_into(self, target: Tensor, name: str) -> None:
        """Copies a tensor into a part of a larger one."""
        target.copy_(self.checkpoint.read(name))
        self._advance()

    def empty(self, *shape: int) -> Tensor:
        """Memory for several tensors of the checkpoint."""
        return torch.empty(shape, dtype=self.config.dtype, device=self.device)

    def norm(self, name: str) -> RmsNorm:
        """A layer norm."""
        return RmsNorm(weight=self.read(name), eps=self.config.norm_eps)


def _build(reader: _WeightReader) -> CausalLM:
    config = reader.config
    embedding = reader.read(EMBEDDING)
    layers = tuple(_read_layer(reader, layer) for layer in range(config.num_layers))
    return CausalLM(
        config=config,
        embedding=embedding,
        layers=layers,
        final_norm=reader.norm(FINAL_NORM),
        lm_head=_read_lm_head(reader, embedding),
        rope=_rope_table(config, reader.device),
        fingerprint=_fingerprint(config, reader.checkpoint.digests),
    )


def _read_lm_head(reader: _WeightReader, embedding: Tensor) -> Tensor:
    if not reader.config.tie_word_embeddings:
        return reader.read(LM_HEAD)
    stored_too = LM_HEAD in reader.checkpoint.names
    if stored_too and not torch.equal(
        reader.checkpoint.read(LM_HEAD), reader.checkpoint.read(EMBEDDING)
    ):
        raise CheckpointError(
            field=LM_HEAD, value="differs", limit=f"{EMBEDDING}, as tie_word_embeddings says"
        )
    return embedding


def _read_layer(reader: _WeightReader, layer: int) -> TransformerLayer:
    prefix = layer_prefix(layer)
    read_mlp = _read_moe if reader.config.is_sparse[layer] else _read_dense
    return TransformerLayer(
        input_norm=reader.norm(f"{prefix}input_layernorm.weight"),
        attention=_read_attention(reader, layer),
        post_attention_norm=reader.norm(f"{prefix}post_attention_layernorm.weight"),
        mlp=read_mlp(reader, f"{prefix}mlp."),
    )


def _read_attention(reader: _WeightReader, layer: int) -> NativeWeights:
    prefix = f"{layer_prefix(layer)}self_attn."
    w_uk_t, w_uv = split_kv_b(reader.read(f"{prefix}kv_b_proj.weight"), reader.config.attention)
    weights = NativeWeights(
        q_a_proj=reader.read(f"{prefix}q_a_proj.weight"),
        q_a_norm=reader.read(f"{prefix}q_a_layernorm.weight"),
        q_b_proj=reader.read(f"{prefix}q_b_proj.weight"),
        kv_a_proj=reader.read(f"{prefix}kv_a_proj_with_mqa.weight"),
        kv_a_norm=reader.read(f"{prefix}kv_a_layernorm.weight"),
        w_uk_t=w_uk_t,
        w_uv=w_uv,
        o_proj=reader.read(f"{prefix}o_proj.weight"),
        indexer=_read_indexer(reader, f"{prefix}indexer.")
        if reader.config.has_indexer[layer]
        else None,
    )
    weights.validate(reader.config.attention)
    return weights


def _read_indexer(reader: _WeightReader, prefix: str) -> IndexerWeights:
    return IndexerWeights(
        wq_b=reader.read(f"{prefix}wq_b.weight"),
        wk=reader.read(f"{prefix}wk.weight"),
        k_norm_weight=reader.read(f"{prefix}k_norm.weight"),
        k_norm_bias=reader.read(f"{prefix}k_norm.bias"),
        weights_proj=reader.read(f"{prefix}weights_proj.weight"),
    )


def _read_dense(reader: _WeightReader, prefix: str) -> GatedMlp:
    return _read_gated_mlp(reader, prefix, reader.config.intermediate_size)


def _read_gated_mlp(reader: _WeightReader, prefix: str, intermediate_size: int) -> GatedMlp:
    width = reader.config.hidden_size
    mlp = GatedMlp(
        gate_up=reader.empty(2 * intermediate_size, width),
        down=reader.empty(width, intermediate_size),
    )
    _fill_gated_mlp(reader, prefix, mlp.gate_up, mlp.down)
    return mlp


def _fill_gated_mlp(reader: _WeightReader, prefix: str, gate_up: Tensor, down: Tensor) -> None:
    gate, up = gate_up.chunk(2)
    reader.read_into(gate, f"{prefix}gate_proj.weight")
    reader.read_into(up, f"{prefix}up_proj.weight")
    reader.read_into(down, f"{prefix}down_proj.weight")


def _read_moe(reader: _WeightReader, prefix: str) -> MoeMlp:
    moe, width = reader.config.moe, reader.config.hidden_size
    experts = RoutedExperts(
        gate_up=reader.empty(moe.num_experts, 2 * moe.intermediate_size, width),
        down=reader.empty(moe.num_experts, width, moe.intermediate_size),
    )
    for expert in range(moe.num_experts):
        own = f"{prefix}experts.{expert}."
        _fill_gated_mlp(reader, own, experts.gate_up[expert], experts.down[expert])
    router = Router(
        weight=reader.read(f"{prefix}gate.weight", torch.float32),
        correction_bias=reader.read(f"{prefix}gate.e_score_correction_bias", torch.float32),
        shape=moe,
    )
    shared_width = moe.num_shared_experts * moe.intermediate_size
    shared = _read_gated_mlp(reader, f"{prefix}shared_experts.", shared_width)
    return MoeMlp(router=router, experts=experts, shared=shared)


def _rope_table(config: ModelConfig, device: torch.device) -> RopeTable:
    table = build_rope_table(
        config.attention.qk_rope_head_dim,
        config.max_position_embeddings,
        config.rope.theta,
        config.rope.scaling,
    )
    return RopeTable(cos=table.cos.to(device), sin=table.sin.to(device))


def _fingerprint(config: ModelConfig, digests: Mapping[str, str]) -> str:
    lines = [_FINGERPRINT_VERSION, config.canonical_json()]
    lines += [f"{name} {digests[name]}" for name in sorted(digests)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextmanager
def _progress_bar(name: str, num_tensors: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn("loading {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task(name, total=num_tensors)
        yield lambda: bar.advance(task)
