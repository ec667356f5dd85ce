"""Faults that a test injects into a prefill process, by wrapping its transfer engine.

The plan travels as JSON in one environment variable that only the test entry point reads; the
product code knows nothing of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

PLAN_VARIABLE = "FAULT_PLAN_OF_TEST"


class Fault(StrEnum):
    """What happens at the planned write."""

    NONE = "none"
    KILL_SELF = "kill_self"
    FLIP_BYTE = "flip_byte"
    ZERO_INDEX_KEYS = "zero_index_keys"
    FAIL_WRITE = "fail_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """When and what.

    Attributes:
        fault: the kind.
        layer: the layer at whose write it happens; -1 means every layer.
        times: how often it happens; -1 means without end.
        write_delay_s: seconds that every write waits first, which makes phases long enough to hit.
        arm_file: the fault is dormant until this file exists; empty means armed from the start.
    """

    fault: Fault = Fault.NONE
    layer: int = -1
    times: int = -1
    write_delay_s: float = 0.0
    arm_file: str = ""

    def to_env(self) -> dict[str, str]:
        """The environment entry that carries the plan."""
        return {PLAN_VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def from_json(text: str) -> FaultPlan:
        """Reads what `to_env` wrote."""
        fields = json.loads(text)
        return FaultPlan(**{**fields, "fault": Fault(fields["fault"])})
