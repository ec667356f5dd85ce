"""Looks at this machine and says what Tandem finds: what is needed, and what is merely useful.

Each check is one function that returns findings and never raises for a missing thing. None of them
changes the machine; the check of shared memory maps one page and gives it back.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_MIN_PYTHON = (3, 11)
_MIN_FREE_BYTES = 2 * 2**30
_DISTRIBUTIONS = ("tandem-serve", "grpcio", "protobuf", "smg-grpc-proto", "safetensors")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
_COMPILERS = ("c++", "g++", "clang++")


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Something optional is absent."""
    MISSING = "missing"
    """Something needed is absent: services will not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        level: How much it matters.
        value: What was found.
        advice: What to do about it; empty when nothing is to be done.
    """

    name: str
    level: Level
    value: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run all checks."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _check_python,
        _check_distributions,
        _check_torch,
        _check_cpu,
        _check_memory,
        _check_shared_memory,
        _check_pidfd,
        _check_socket_dir,
        _check_mooncake,
        _check_default_model,
        _check_optional,
        _check_compiler,
    )
    return [finding for check in checks for finding in check()]


def _check_python() -> Iterable[Finding]:
    is_new_enough = sys.version_info >= _MIN_PYTHON
    wanted = ".".join(map(str, _MIN_PYTHON))
    yield Finding(
        name="python",
        level=Level.OK if is_new_enough else Level.MISSING,
        value=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        advice="" if is_new_enough else f"install Python {wanted} or newer",
    )
    if sys.platform != "linux":
        yield Finding(
            name="system",
            level=Level.MISSING,
            value=platform.system(),
            advice="the shm engine and the launcher need Linux",
        )


def _check_distributions() -> Iterable[Finding]:
    for name in _DISTRIBUTIONS:
        version = _version(name)
        yield Finding(
            name=name,
            level=Level.MISSING if version is None else Level.OK,
            value=version or "not installed",
            advice="make setup" if version is None else "",
        )


def _check_torch() -> Iterable[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # A broken library fails with OSError.
        yield Finding(name="torch", level=Level.MISSING, value=str(error), advice="make setup")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding(
        name="torch",
        level=Level.OK,
        value=f"{torch.__version__}, {build}, kernels for {capability}",
    )


def _check_cpu() -> Iterable[Finding]:
    flags = _cpu_flags()
    present = [flag for flag in _CPU_FLAGS if flag in flags]
    usable = len(os.sched_getaffinity(0))
    yield Finding(
        name="cpu",
        level=Level.OK,
        value=f"{usable} of {os.cpu_count()} cores usable; {' '.join(present) or 'no AVX2'}",
    )


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())


def _check_memory() -> Iterable[Finding]:
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available_bytes = _available_bytes() or free_bytes
    is_enough = available_bytes >= _MIN_FREE_BYTES
    yield Finding(
        name="memory",
        level=Level.OK if is_enough else Level.NOTE,
        value=f"{available_bytes / 2**30:.1f} GiB available",
        advice="" if is_enough else "a pair with the default model needs about 1.5 GiB",
    )


def _available_bytes() -> int | None:
    """What the kernel could give without swapping; None where it does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _check_shared_memory() -> Iterable[Finding]:
    try:
        descriptor = os.memfd_create("tandem-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, os.sysconf("SC_PAGE_SIZE"))
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        advice = "the shm engine needs memfd_create (Linux 3.17)"
        yield Finding(name="memfd", level=Level.MISSING, value=str(error), advice=advice)
        return
    yield Finding(name="memfd", level=Level.OK, value="sealed shared memory works")


def _check_pidfd() -> Iterable[Finding]:
    try:
        descriptor = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(descriptor, 0)  # 0 only probes.
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        advice = "the shm engine proves a peer's death by pidfd_open (Linux 5.3)"
        yield Finding(name="pidfd", level=Level.MISSING, value=str(error), advice=advice)
        return
    yield Finding(name="pidfd", level=Level.OK, value="a peer's death can be proven")


def _check_socket_dir() -> Iterable[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as folder:
            mode = stat.S_IMODE(os.stat(folder).st_mode)
    except OSError as error:
        advice = "set TMPDIR to a directory that you may write to"
        yield Finding(name="socket dir", level=Level.MISSING, value=str(error), advice=advice)
        return
    is_private = mode == stat.S_IRWXU
    yield Finding(
        name="socket dir",
        level=Level.OK if is_private else Level.MISSING,
        value=f"{tempfile.gettempdir()}, new directories have mode {mode:04o}",
        advice="" if is_private else "the file system ignores modes; set TMPDIR to another one",
    )


def _check_mooncake() -> Iterable[Finding]:
    from kv_transfer.engine.mooncake import MooncakeEngine, MooncakeSettings
    from kv_transfer.errors import EngineConfigError

    version = _version("mooncake-transfer-engine-non-cuda") or "installed"
    try:
        MooncakeEngine(MooncakeSettings())
    except EngineConfigError as error:
        yield Finding(
            name="mooncake",
            level=Level.NOTE,
            value=str(error),
            advice="only needed for --kv-engine mooncake: make setup as root, or see the README",
        )
    else:
        yield Finding(name="mooncake", level=Level.OK, value=f"{version}, the engine starts")


def _check_default_model() -> Iterable[Finding]:
    from tandem.default_model import default_model_dir

    try:
        model_dir = default_model_dir()
    except FileNotFoundError as error:
        advice = "reinstall, or pass --model"
        yield Finding(name="default model", level=Level.NOTE, value=str(error), advice=advice)
        return
    yield Finding(name="default model", level=Level.OK, value=model_dir.name)


def _check_optional() -> Iterable[Finding]:
    wanted = (
        ("smg", "smg", "the public HTTP router: pip install smg"),
        ("torch-npu", "torch_npu", "Ascend NPU (not used by this version)"),
    )
    for distribution, module, purpose in wanted:
        version = _version(distribution)
        is_present = version is not None or importlib.util.find_spec(module) is not None
        yield Finding(
            name=module,
            level=Level.OK if is_present else Level.NOTE,
            value=(version or "present") if is_present else "not installed",
            advice="" if is_present else f"optional: {purpose}",
        )


def _check_compiler() -> Iterable[Finding]:
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    yield Finding(
        name="c++ compiler",
        level=Level.OK if found else Level.NOTE,
        value=found or "none",
        advice="" if found else "optional: this version needs none",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
