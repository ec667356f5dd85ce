"""Entry point of a service process that also writes down which keys each query chose.

Run as `python -m tests.support.recording_service ROLE FILE [flags of the service]`. Each line of
the file is {"layer": l, "position": p, "chosen": [...]} for one query of one step.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TextIO

from torch import Tensor

from serving_core.config import load_decode_config, load_prefill_config
from serving_core.service_process import run_service


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
        if role == "prefill":
            return _run_prefill(flags, log)
        return _run_decode(flags, log)


def _run_prefill(flags: list[str], log: SelectionLog) -> int:
    from prefill_service.app import build

    return run_service(
        "prefill",
        load=partial(load_prefill_config, flags),
        build=partial(build, topk_observer=log.record),
    )


def _run_decode(flags: list[str], log: SelectionLog) -> int:
    from decode_service.app import build

    return run_service(
        "decode",
        load=partial(load_decode_config, flags),
        build=partial(build, step_observer=log.record),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
