"""Entry point of a prefill process whose transfer engine misbehaves as a test planned.

Run as `python -m tests.support.faulty_prefill`; it takes the flags of `python -m prefill_service`
and the plan of `tests.support.fault_plan` from the environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kv_transfer.engine.base import (
    CopySpan,
    TargetDescriptor,
    TargetMemory,
    TransferEngine,
    WriterLink,
)
from kv_transfer.errors import WriteFaultError
from kv_transfer.layout import KvLayout
from prefill_service.app import build
from serving_core.config import PrefillConfig, load_prefill_config
from serving_core.kv_engines import make_engine
from serving_core.service_process import run_service
from tests.support.fault_plan import PLAN_VARIABLE, Fault, FaultPlan


class FaultClock:
    """Counts the writes of each layer and says when the planned fault is due.

    A layer's components arrive as consecutive writes; `num_components[layer]` tells them apart.
    """

    def __init__(self, plan: FaultPlan, components: Sequence[Sequence[str]]) -> None:
        self._plan = plan
        self._order = [(layer, name) for layer, names in enumerate(components) for name in names]
        self._next = 0
        self._fired = 0
        self._lock = threading.Lock()

    def observe(self) -> tuple[int, str, bool]:
        """The layer and component of this write, and whether the fault happens now."""
        with self._lock:
            layer, component = self._order[self._next % len(self._order)]
            self._next += 1
            due = self._is_due(layer, component)
            self._fired += int(due)
            return layer, component, due

    def _is_due(self, layer: int, component: str) -> bool:
        plan = self._plan
        if plan.fault is Fault.NONE or (plan.arm_file and not Path(plan.arm_file).exists()):
            return False
        if plan.times >= 0 and self._fired >= plan.times:
            return False
        if plan.fault is Fault.ZERO_INDEX_KEYS and component != "index_key":
            return False
        return plan.layer in (-1, layer)


class FaultyLink:
    """A writer link that misbehaves when its clock says so, and else does the real work."""

    def __init__(self, link: WriterLink, plan: FaultPlan, clock: FaultClock) -> None:
        self._link = link
        self._plan = plan
        self._clock = clock

    def write(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        """Writes, after the planned delay, with the planned fault."""
        if self._plan.write_delay_s > 0:
            threading.Event().wait(self._plan.write_delay_s)
        _, _, due = self._clock.observe()
        if not due:
            return self._link.write(copies, should_stop)
        return self._misbehave(copies, should_stop)

    def _misbehave(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        match self._plan.fault:
            case Fault.KILL_SELF:
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError("unreachable")
            case Fault.FAIL_WRITE:
                raise WriteFaultError("planned fault of the test")
            case Fault.FLIP_BYTE:
                digest = self._link.write(copies, should_stop)
                self._flip(copies[0], should_stop)
                return digest
            case Fault.ZERO_INDEX_KEYS:
                return self._write_zeros(copies, should_stop)
            case Fault.NONE:
                return self._link.write(copies, should_stop)

    def _flip(self, span: CopySpan, should_stop: Callable[[], bool]) -> None:
        wrong = ctypes.create_string_buffer(1)
        wrong[0] = bytes([ctypes.string_at(span.source_address, 1)[0] ^ 0x40])
        one_byte = CopySpan(
            source_address=ctypes.addressof(wrong), target_offset=span.target_offset, num_bytes=1
        )
        self._link.write([one_byte], should_stop)

    def _write_zeros(self, copies: Sequence[CopySpan], should_stop: Callable[[], bool]) -> int:
        zeros = ctypes.create_string_buffer(max(span.num_bytes for span in copies))
        blank = [
            CopySpan(
                source_address=ctypes.addressof(zeros),
                target_offset=span.target_offset,
                num_bytes=span.num_bytes,
            )
            for span in copies
        ]
        return self._link.write(blank, should_stop)

    def peer_is_dead(self) -> bool:
        """As the real link."""
        return self._link.peer_is_dead()

    def proves_quiet(self) -> bool:
        """As the real link."""
        return self._link.proves_quiet()

    def close(self) -> None:
        """As the real link."""
        self._link.close()


class FaultyEngine:
    """A transfer engine whose links misbehave."""

    def __init__(
        self, engine: TransferEngine, plan: FaultPlan, components: Sequence[Sequence[str]]
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._clock = FaultClock(plan, components)
        self.name = engine.name
        self.can_fence_writer = engine.can_fence_writer

    def create_target(self, num_bytes: int) -> TargetMemory:
        """As the real engine."""
        return self._engine.create_target(num_bytes)

    def connect(
        self, descriptor: TargetDescriptor, prefill_incarnation: str, timeout_s: float
    ) -> WriterLink:
        """A faulty link around a real one."""
        link = self._engine.connect(descriptor, prefill_incarnation, timeout_s)
        return FaultyLink(link, self._plan, self._clock)


def main(argv: list[str]) -> int:
    """Run the service with the planned faults; returns the exit code."""
    plan = FaultPlan.from_json(os.environ[PLAN_VARIABLE])

    def wrap(config: PrefillConfig, layout: KvLayout) -> FaultyEngine:
        components = [[part.name for part in layer.components] for layer in layout.layers]
        return FaultyEngine(make_engine(config), plan, components)

    return run_service(
        "prefill",
        load=partial(load_prefill_config, argv),
        build=partial(build, engine_factory=wrap),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
