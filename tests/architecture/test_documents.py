"""What the documents say exists: targets, commands, links, files, names, configuration keys."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from serving_core.config import render_reference
from tandem.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern) if path.is_file()
)
CODE_REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def names_of(path: Path) -> set[str]:
    """Top-level names of a module, and `Class.member` of its classes."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, members)}
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_only_code_that_exists(document: Path) -> None:
    missing = []
    for file, name in CODE_REFERENCE.findall(document.read_text(encoding="utf-8")):
        path = ROOT / file
        if not path.is_file() or (name and name not in names_of(path)):
            missing.append(f"{file}:{name}")
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_lead_somewhere(document: Path) -> None:
    targets = [
        link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link
    ]
    assert [link for link in targets if not (document.parent / link).exists()] == []


def test_architecture_names_each_step_in_the_code() -> None:
    """The check above is empty for a document that refers to nothing."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [name for _, name in CODE_REFERENCE.findall(text) if name]
    assert len(named) > 40


def make_targets() -> set[str]:
    """Targets that `make help` lists."""
    result = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return {line.split()[0] for line in result.stdout.splitlines() if line.strip()}


def test_make_has_the_targets_that_people_rely_on() -> None:
    wanted = {"setup", "demo", "test", "lint", "types", "imports", "proto", "bench"}
    assert make_targets() >= wanted


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_document_make_commands_are_targets(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    mentioned = set(re.findall(r"\bmake ([a-z-]+)\b", "\n".join(code_of(text))))
    assert mentioned
    assert mentioned <= make_targets()


def test_readme_tandem_commands_exist() -> None:
    text = "\n".join(code_of((ROOT / "README.md").read_text(encoding="utf-8")))
    mentioned = set(re.findall(r"(?:^|[\s/])tandem (?!import)([a-z]+)\b", text, flags=re.MULTILINE))
    commands = {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    assert mentioned
    assert mentioned <= commands


def code_of(text: str) -> list[str]:
    """Code blocks and code spans of a document."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    return blocks + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"for target in (.*);", ci)[0].split()
    assert targets == ["setup", "lint", "types", "imports", "proto-check", "test"]


def test_configuration_reference_is_fresh() -> None:
    """`make docs` was run after the last change of a key."""
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == render_reference()
