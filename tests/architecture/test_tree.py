"""House rules that a machine can check: sizes, names, who reads the environment and addresses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "attention_core",
    "kv_transfer",
    "serving_core",
    "prefill_service",
    "decode_service",
    "tandem",
)
MAX_LINES = 500
MAX_TEST_LINES = 700
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base_impl"}
# child_process hands its own environment on to a service; it reads nothing from it.
ENVIRONMENT_READERS = {"serving_core/config.py", "tandem/child_process.py"}

# paged_kv only checks that its buffer is aligned.
ADDRESS_READERS = {"serving_core/kv_regions.py", "attention_core/paged_kv.py"}


def modules(*folders: str) -> list[Path]:
    """Hand-written modules below the folders."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "v1" not in path.relative_to(ROOT).parts]


PRODUCT = modules(*PACKAGES)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PRODUCT}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_product_is_found() -> None:
    """The checks below are empty when nothing is found."""
    assert len(PRODUCT) > 80
    assert {path.relative_to(ROOT).parts[0] for path in PRODUCT} == set(PACKAGES)


def test_no_module_is_too_long() -> None:
    limits = [(path, MAX_LINES) for path in PRODUCT]
    limits += [(path, MAX_TEST_LINES) for path in modules("tests", "bench")]
    lengths = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path, limit in limits
        if len(path.read_text(encoding="utf-8").splitlines()) > limit
    }
    assert lengths == {}


def test_no_function_is_too_long() -> None:
    """Signatures do not count: a command's options are its signature."""
    too_long = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                last = node.end_lineno
                assert last is not None
                num_lines = last - node.body[0].lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    too_long[f"{name_of(path)}:{node.name}"] = num_lines
    assert too_long == {}


def test_every_module_says_its_idea_first() -> None:
    silent = [name_of(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    assert silent == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name_of(path) for path in PRODUCT if path.stem in BANNED_NAMES] == []


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(TODO|FIXME|HACK|XXX)\b|type: ignore(?!\[)|# noqa(?!:)")
    found = [name_of(path) for path in PRODUCT if marks.search(path.read_text(encoding="utf-8"))]
    assert found == []


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(object, attribute) of each access such as os.environ."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def test_only_the_configuration_reads_the_environment() -> None:
    reads = {("os", "environ"), ("os", "getenv")}
    readers = {name_of(path) for path, tree in TREES.items() if reads & set(attributes(tree))}
    assert readers <= ENVIRONMENT_READERS


def test_only_kv_regions_turns_tensors_into_addresses() -> None:
    users = {
        name_of(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr"
    }
    assert users <= ADDRESS_READERS


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_services_import_only_the_stubs_of_tandem() -> None:
    """import-linter cannot follow the link tandem/v1, so it cannot check this."""
    wrong = {
        (name_of(path), name)
        for path, tree in TREES.items()
        if path.relative_to(ROOT).parts[0] != "tandem"
        for name in imported_modules(tree)
        if name.split(".")[0] == "tandem" and not name.startswith("tandem.v1.")
    }
    assert wrong == set()


def test_oracles_share_no_code_with_the_product() -> None:
    wrong = {
        (name_of(path), name)
        for path in modules("tests/reference")
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[0] in PACKAGES
    }
    assert wrong == set()


@pytest.mark.parametrize(
    ("package", "doors"),
    [("mooncake", ["kv_transfer/engine/mooncake_child.py"]), ("torch_npu", []), ("vllm", [])],
)
def test_vendors_have_one_door_each(package: str, doors: list[str]) -> None:
    """Nothing else may lean on them."""
    users = [
        name_of(path)
        for path, tree in TREES.items()
        if any(name.split(".")[0] == package for name in imported_modules(tree))
    ]
    assert users == doors
