"""The real prefill service inside the test's event loop, with hooks where a test must hold it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attention_core.paged_kv import PagedKvCache
from attention_core.plan import AttentionPlan
from attention_core.strategy import AttentionStrategy, KvWritten
from kv_transfer.engine.base import (
    CopySpan,
    TargetDescriptor,
    TargetMemory,
    TransferEngine,
    WriterLink,
)
from kv_transfer.engine.loopback import LoopbackEngine
from prefill_service.app import PrefillApp, build
from serving_core.config import PrefillConfig
from serving_core.model.transformer import CausalLM
from tests.support.fake_decode import FakeDecode, fake_decode

HOLD_TIMEOUT_S = 20.0


class Gate:
    """Holds other threads until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    @property
    def is_reached(self) -> bool:
        """Whether a thread has come to the gate."""
        return self._reached.is_set()

    def wait_reached(self) -> None:
        """Blocks the calling thread, not an event loop, until a thread has come to the gate."""
        assert self._reached.wait(HOLD_TIMEOUT_S), "nobody came to the gate"

    def open(self) -> None:
        """Lets everybody pass, now and later."""
        self._open.set()

    def hold(self) -> None:
        """Waits at the gate; called on the held thread."""
        self._reached.set()
        assert self._open.wait(HOLD_TIMEOUT_S), "nobody opened the gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedModel(CausalLM):
    """A model that calls `on_layer(layer)` on the compute thread once a layer's KV is written."""

    on_layer: Callable[[int], None]

    @classmethod
    def of(cls, model: CausalLM, on_layer: Callable[[int], None]) -> HookedModel:
        """The same weights with a hook."""
        parts = {part.name: getattr(model, part.name) for part in fields(CausalLM)}
        return cls(**parts, on_layer=on_layer)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        plan: AttentionPlan,
        cache: PagedKvCache,
        strategy: AttentionStrategy,
        *,
        on_kv_written: Callable[[KvWritten], None] | None = None,
        on_topk: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """As the model; the hook runs after the layer's rows were handed to the push."""

        def written(event: KvWritten) -> None:
            if on_kv_written is not None:
                on_kv_written(event)
            self.on_layer(event.layer)

        return CausalLM.forward(
            self, token_ids, plan, cache, strategy, on_kv_written=written, on_topk=on_topk
        )


class HookedLink:
    """A link that calls `before_write(number)` on the push thread; writes count from zero."""

    def __init__(self, link: WriterLink, before_write: Callable[[int], None]) -> None:
        self._link = link
        self._before_write = before_write
        self._num_writes = 0

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """Calls the hook, then writes."""
        number = self._num_writes
        self._num_writes += 1
        self._before_write(number)
        return self._link.write(copies, should_stop)

    def peer_is_dead(self) -> bool:
        """As the real link."""
        return self._link.peer_is_dead()

    def proves_quiet(self) -> bool:
        """As the real link."""
        return self._link.proves_quiet()

    def close(self) -> None:
        """As the real link."""
        self._link.close()


class HookedEngine:
    """An engine whose links have a hook."""

    def __init__(self, engine: TransferEngine, before_write: Callable[[int], None]) -> None:
        self._engine = engine
        self._before_write = before_write
        self.name = engine.name
        self.can_fence_writer = engine.can_fence_writer

    def create_target(self, num_bytes: int) -> TargetMemory:
        """As the real engine."""
        return self._engine.create_target(num_bytes)

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> WriterLink:
        """A link with the hook."""
        link = self._engine.connect(descriptor, prefill_incarnation, timeout_s)
        return HookedLink(link, self._before_write)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A running prefill service and a decode service that has shaken hands with it."""

    app: PrefillApp
    model: CausalLM
    engine: TransferEngine
    decode: FakeDecode

    @property
    def num_computing(self) -> int:
        """Number of jobs that the compute thread has or is about to get."""
        return sum(job.in_compute for job in self.app._jobs._jobs.values())


@asynccontextmanager
async def running_prefill(
    model: CausalLM, *, engine: TransferEngine | None = None, **settings: Any
) -> AsyncIterator[Prefill]:
    """Runs the service until the block ends; in the end no block may be missing.

    Args:
        model: The model, which may be hooked.
        engine: The transfer engine of both sides; None takes a new loopback engine.
        settings: Replace keys of PrefillConfig.
    """
    defaults: dict[str, Any] = {
        "model": "given",
        "served_model_name": "given",
        "kv_engine": "loopback",
        "block_size": 8,
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "drain_grace_s": 5.0,
    }
    config = PrefillConfig(**(defaults | settings))
    used_engine = engine if engine is not None else LoopbackEngine()
    app = build(config, engine_factory=lambda *_: used_engine, model=model)
    await app.start()
    try:
        async with fake_decode(
            model, used_engine, app.address, num_blocks=128, block_size=config.block_size
        ) as decode:
            yield Prefill(app=app, model=model, engine=used_engine, decode=decode)
    finally:
        await app.stop()
        if app._fault is None:
            assert app._pool.num_free == app._pool.num_total, "a block was lost"
