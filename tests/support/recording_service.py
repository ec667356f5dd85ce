"""Entry point of a service process that also writes down which keys each query chose.

Run as `python -m tests.support.recording_service ROLE FILE [flags of the service]`. Each line of
the file is {"layer": l, "position": p, "chosen": [...]} for one query of one step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch import Tensor

from serving_core.config import load_decode_config, load_prefill_config
from serving_core.service_process import ServiceApp, run_service


class SelectionLog:
    """Writes the chosen keys of each query; called on the compute thread only."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def record(self, layer: int, topk: Tensor, positions: Tensor) -> None:
        """Write one step: topk int32 [T, K], positions int64 [T]."""
        for chosen, position in zip(topk.tolist(), positions.tolist(), strict=True):
            keys = sorted(key for key in chosen if key >= 0)
            line = {"layer": layer, "position": position, "chosen": keys}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_selections(path: Path) -> dict[tuple[int, int], frozenset[int]]:
    """(layer, position) -> chosen keys, of a process that served one prompt."""
    selections: dict[tuple[int, int], frozenset[int]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        key = (line["layer"], line["position"])
        assert key not in selections, f"{key} was computed twice"
        selections[key] = frozenset(line["chosen"])
    return selections


def main(argv: list[str]) -> int:
    """Run the service; returns its exit code."""
    role, path, *flags = argv
    with Path(path).open("w") as file:
        log = SelectionLog(file)
        builders: dict[str, Callable[[], ServiceApp]] = {
            "prefill": lambda: _build_prefill(flags, log),
            "decode": lambda: _build_decode(flags, log),
        }
        return run_service(role, log_level="info", build=builders[role])


def _build_prefill(flags: list[str], log: SelectionLog) -> ServiceApp:
    from prefill_service.app import build

    return build(load_prefill_config(flags), topk_observer=log.record)


def _build_decode(flags: list[str], log: SelectionLog) -> ServiceApp:
    from decode_service.app import build

    return build(load_decode_config(flags), step_observer=log.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
