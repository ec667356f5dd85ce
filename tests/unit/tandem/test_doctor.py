"""What the doctor says when something is absent."""

from __future__ import annotations

import importlib.metadata
import json
import os

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.doctor import Level, examine


def test_examine_here_finds_nothing_needed_missing() -> None:
    assert [finding for finding in examine() if finding.level is Level.MISSING] == []


def test_examine_without_pidfd_says_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    (finding,) = (finding for finding in examine() if finding.name == "pidfd")
    assert finding.level is Level.MISSING
    assert "Function not implemented" in finding.value
    assert "5.3" in finding.advice


def test_doctor_needed_distribution_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real_version = importlib.metadata.version

    def version(name: str) -> str:
        if name == "smg-grpc-proto":
            raise importlib.metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not report["ok"]
    missing = [finding["name"] for finding in report["findings"] if finding["level"] == "missing"]
    assert missing == ["smg-grpc-proto"]
