"""The oracles share no code with what they judge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REFERENCE_DIR = Path(__file__).parent.parent / "reference"
ALLOWED_ROOTS = {"__future__", "collections", "dataclasses", "math", "numpy"}


def imported_names(source: str) -> Iterator[str]:
    """Full names of the modules that a source imports, a relative import as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_allowed(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in ALLOWED_ROOTS or name.startswith("tests.reference.")


@pytest.mark.parametrize("path", sorted(REFERENCE_DIR.glob("**/*.py")), ids=lambda path: path.name)
def test_reference_module_imports_only_numpy_and_its_siblings(path: Path) -> None:
    foreign = [name for name in imported_names(path.read_text()) if not is_allowed(name)]
    assert foreign == []


def test_reference_modules_are_found() -> None:
    assert (REFERENCE_DIR / "sparse_attention.py").is_file()


@pytest.mark.parametrize(
    "line",
    [
        "import attention_core",
        "from attention_core.plan import build_plan",
        "import torch",
        "from tests.support import oracle",
        "from ..support import oracle",
        "def f():\n    from attention_core import plan",
    ],
)
def test_reference_check_with_a_forbidden_import_sees_it(line: str) -> None:
    assert not all(is_allowed(name) for name in imported_names(line))
