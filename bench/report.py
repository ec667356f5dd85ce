"""What a benchmark leaves: figures, what they were measured with, and whether they hold.

With --json the last line of the output is one JSON object:

    bench, valid, problems      what it is, and why it does not count if it does not
    figures by name             the ones that are compared with a bound
    provenance                  machine, versions, commit, pinning, CPU of others
    details                     raw samples and everything derived from them

The exit status is 0 for a valid measurement and 1 for any other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.cpu import MAX_FOREIGN_CPU_SHARE, CpuWindow

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / "bench" / "results"
_RESERVED = {"bench", "valid", "problems", "provenance", "details"}
_PACKAGES = (
    "tandem-serve",
    "torch",
    "grpcio",
    "protobuf",
    "xxhash",
    "smg",
    "smg-grpc-proto",
    "mooncake-transfer-engine-non-cuda",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One measurement.

    Attributes:
        bench: Its name.
        figures: What is compared with a bound, by name.
        details: Raw samples and what is derived from them; plain JSON values.
        cpu: Who had the cores in the measured window.
        pinned_cores: Role -> core; empty when the processes ran unpinned.
        problems: Further reasons why the figures do not count.
    """

    bench: str
    figures: Mapping[str, float]
    details: Mapping[str, Any]
    cpu: CpuWindow
    pinned_cores: Mapping[str, int]
    problems: Sequence[str] = field(default_factory=tuple)

    def all_problems(self) -> list[str]:
        """Return every reason why the figures do not count; empty when they do."""
        found = list(self.problems)
        if not self.pinned_cores:
            found.append("there are not enough cores to pin each process to one")
        if self.cpu.foreign_share > MAX_FOREIGN_CPU_SHARE:
            found.append(
                f"other processes took {self.cpu.foreign_share:.1%} of the CPU, "
                f"the limit is {MAX_FOREIGN_CPU_SHARE:.0%}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the object that is printed and saved.

        Raises:
            ValueError: A figure has the name of a section.
        """
        if clash := _RESERVED & self.figures.keys():
            raise ValueError(f"no names for figures: {sorted(clash)}")
        problems = self.all_problems()
        return {
            "bench": self.bench,
            "valid": not problems,
            "problems": problems,
            **self.figures,
            "provenance": {
                **provenance(),
                "pinned_cores": dict(self.pinned_cores),
                "cpu": asdict(self.cpu),
            },
            "details": dict(self.details),
        }


def provenance() -> dict[str, Any]:
    """Return when, where and with what this process runs."""
    return {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", *_module_and_arguments()]),
        "commit": _git("rev-parse", "HEAD"),
        "has_local_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark understands."""
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--save", action="store_true", help="write it to bench/results/NAME-DATE.json"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it to a file")


def finish(report: Report, options: argparse.Namespace, results_dir: Path = RESULTS_DIR) -> int:
    """Write and print what the options ask for.

    Returns:
        The exit status.
    """
    content = report.to_json()
    paths = [options.output] if options.output is not None else []
    if options.save:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        paths.append(results_dir / f"{report.bench}-{date}.json")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, value in report.figures.items():
        print(f"{name:28} {value:.4g}", file=sys.stderr)
    for problem in content["problems"]:
        print(f"not valid: {problem}", file=sys.stderr)
    if options.json:
        print(json.dumps(content, separators=(",", ":")), flush=True)
    return 0 if content["valid"] else 1


def _module_and_arguments() -> list[str]:
    """Return the running module and its arguments, without paths of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    return [name, *sys.argv[1:]]


def _git(*arguments: str) -> str:
    """Return what git says of the source tree; empty without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
