"""The model as this service runs it: loaded, bounded, and with its decode steps captured."""

from dataclasses import dataclass
from pathlib import Path

import torch

from attention_core.backends.cpu import CpuDevice, CpuKernels
from attention_core.decode_dsa import DsaDecode
from attention_core.paged_kv import PagedKvCache
from decode_service.graph_runner import GraphRunner, StepObserver
from decode_service.service_info import ModelInfo
from serving_core.config import DecodeConfig
from serving_core.errors import ConfigError
from serving_core.model.config import DTYPES
from serving_core.model.config_fields import read_json_object
from serving_core.model.loading import load_model
from serving_core.model.transformer import CausalLM
from serving_core.tokenizer import Tokenizer

# Beyond this many sequences a step computes long enough to hide what a replay saves.
_MAX_GRAPH_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model with its tokenizer.

    Attributes:
        model: The weights.
        tokenizer: Perhaps without files.
        max_model_len: Longest sequence, in tokens.
    """

    model: CausalLM
    tokenizer: Tokenizer
    max_model_len: int


def load_served_model(config: DecodeConfig, model: CausalLM | None) -> ServedModel:
    """Load what the configuration names.

    Args:
        config: The configuration.
        model: Taken instead of loading the weights again, for tests.

    Raises:
        CheckpointError: The checkpoint cannot be loaded.
        ConfigError: max-model-len is beyond what the model or the pool can hold.
    """
    model_dir = Path(config.model)
    if model is None:
        dtype = None if config.dtype == "auto" else DTYPES[config.dtype]
        model = load_model(model_dir, dtype=dtype, device=config.device)
    longest = min(model.config.max_position_embeddings, config.num_kv_blocks * config.block_size)
    if config.max_model_len > longest:
        raise ConfigError(
            [
                f"max-model-len = {config.max_model_len}: must be at most {longest}, which is what "
                "the model's positions and num-kv-blocks * block-size allow"
            ]
        )
    return ServedModel(
        model=model,
        tokenizer=Tokenizer.from_dir(model_dir),
        max_model_len=config.max_model_len or longest,
    )


def make_stepper(
    config: DecodeConfig,
    served: ServedModel,
    cache: PagedKvCache,
    observer: StepObserver | None,
) -> GraphRunner:
    """Capture the decode steps over the cache; raises what a step raises."""
    device = CpuDevice()
    stepper = GraphRunner(
        model=served.model,
        cache=cache,
        strategy=DsaDecode(served.model.config.attention, CpuKernels(), device),
        device=device,
        max_graph_batch_size=(
            min(config.max_num_seqs, _MAX_GRAPH_BATCH_SIZE) if config.graph_capture else 0
        ),
        max_model_len=served.max_model_len,
        observer=observer,
    )
    with torch.inference_mode():
        stepper.capture()
    return stepper


def model_info(config: DecodeConfig, served: ServedModel) -> ModelInfo:
    """Return what routers are told about the model."""
    model_config = served.model.config
    architectures = read_json_object(Path(config.model) / "config.json").get("architectures")
    return ModelInfo(
        model_path=str(Path(config.model).resolve()),
        served_model_name=config.served_model_name,
        model_type=model_config.model_type,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        dtype=str(model_config.dtype).removeprefix("torch."),
        fingerprint=served.model.fingerprint,
        vocab_size=model_config.vocab_size,
        max_model_len=served.max_model_len,
        max_prompt_tokens=served.max_model_len - 1,
        eos_token_ids=model_config.eos_token_ids,
        bos_token_id=model_config.bos_token_id,
        pad_token_id=model_config.pad_token_id,
        has_tokenizer=served.tokenizer.is_available,
    )
