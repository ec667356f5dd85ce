"""What the service tells routers about itself and its load."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from decode_service.coordinator import RequestCoordinator
from serving_core.block_pool import BlockPool

_SERVER_TYPE = "vllm-grpc"
_ATTENTION_BACKEND = "tandem-dsa"
# A router opens this path on its own host before it asks for GetTokenizer, and asks a public model
# hub where it does not exist. What this path names exists everywhere and is no tokenizer, so every
# router takes our files, from our host, as GetTokenizer prepares them.
_NO_TOKENIZER_HERE = "/dev/null"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the served model that never change.

    Attributes:
        model_path: Directory of the checkpoint.
        served_model_name: Name told to clients.
        model_type: Family name of config.json.
        architectures: As config.json names them.
        dtype: Of weights and KV, without torch's prefix.
        fingerprint: Identifies architecture and weights.
        vocab_size: Number of token ids.
        max_model_len: Longest sequence, in tokens.
        max_prompt_tokens: Longest prompt, in tokens.
        eos_token_ids: End tokens.
        bos_token_id: None when there is none.
        pad_token_id: None when there is none.
        has_tokenizer: Whether GetTokenizer can answer.
    """

    model_path: str
    served_model_name: str
    model_type: str
    architectures: tuple[str, ...]
    dtype: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    has_tokenizer: bool


class ServiceInfo:
    """Answers GetModelInfo, GetServerInfo and GetLoads."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        incarnation: str,
        version: str,
        block_size: int,
        max_num_seqs: int,
        pool: BlockPool,
        coordinator: RequestCoordinator,
        clock: Callable[[], float],
    ) -> None:
        """Take facts and sources."""
        self._model = model
        self._incarnation = incarnation
        self._version = version
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._pool = pool
        self._coordinator = coordinator
        self._clock = clock
        self._started_s = clock()
        self._last_receive_s = 0.0

    @property
    def served_model_name(self) -> str:
        """Name told to clients."""
        return self._model.served_model_name

    def note_received(self) -> None:
        """Note that a client sent a request."""
        self._last_receive_s = time.time()

    def model_info(self) -> pb.GetModelInfoResponse:
        """Answer GetModelInfo; -1 stands for a token that the model does not have."""
        model = self._model
        return pb.GetModelInfoResponse(
            model_path=model.model_path,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            supports_vision=False,
            served_model_name=model.served_model_name,
            tokenizer_path=_NO_TOKENIZER_HERE if model.has_tokenizer else "",
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=-1 if model.pad_token_id is None else model.pad_token_id,
            bos_token_id=-1 if model.bos_token_id is None else model.bos_token_id,
            max_req_input_len=model.max_prompt_tokens,
        )

    def server_info(self) -> pb.GetServerInfoResponse:
        """Answer GetServerInfo. Routers see no KV connector: how KV comes here is our business."""
        return pb.GetServerInfoResponse(
            active_requests=self._coordinator.num_open,
            is_paused=self._coordinator.is_draining,
            last_receive_timestamp=self._last_receive_s,
            uptime_seconds=self._clock() - self._started_s,
            server_type=_SERVER_TYPE,
            kv_engine_id=self._incarnation,
            data_parallel_size=1,
            kv_cache_dtype=self._model.dtype,
            block_size=self._block_size,
            attention_backend=_ATTENTION_BACKEND,
            model_dtype=self._model.dtype,
            pairing_protocol=f"tandem/1/{self._model.fingerprint[:16]}",
            max_num_seqs=self._max_num_seqs,
        )

    def loads(self) -> pb.GetLoadsResponse:
        """Answer GetLoads with the counts of this moment."""
        coordinator, pool = self._coordinator, self._pool
        num_used = pool.num_total - pool.num_free - pool.num_evictable
        usage = num_used / pool.num_total
        load = pb.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=coordinator.num_running,
            num_waiting_reqs=coordinator.num_open - coordinator.num_running,
            num_total_reqs=coordinator.num_open,
            num_used_tokens=num_used * self._block_size,
            max_total_num_tokens=pool.num_total * self._block_size,
            token_usage=usage,
            gen_throughput=coordinator.tokens_per_s,
            utilization=max(usage, coordinator.num_running / self._max_num_seqs),
            max_running_requests=self._max_num_seqs,
            num_waiting_uncached_tokens=coordinator.num_waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._version,
            dp_rank_count=1,
            loads=[load],
        )
