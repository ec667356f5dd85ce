"""Reports: what makes a measurement invalid, what is printed, where it goes."""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cpu import CpuWindow
from bench.report import Report, add_options, finish

QUIET = CpuWindow(wall_s=10.0, foreign_share=0.05, steal_share=0.0, own_share=0.6)
GOOD = Report(
    bench="sample",
    figures={"speed_ratio": 0.5},
    details={"samples": [1.0, 2.0]},
    cpu=QUIET,
    pinned_cores={"sender": 0, "receiver": 1},
)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_report_of_a_quiet_machine_is_valid() -> None:
    content = GOOD.to_json()
    assert content["valid"] is True
    assert content["problems"] == []
    assert content["speed_ratio"] == 0.5
    assert content["details"]["samples"] == [1.0, 2.0]
    provenance = content["provenance"]
    assert provenance["pinned_cores"] == {"sender": 0, "receiver": 1}
    assert provenance["cpu"]["foreign_share"] == 0.05
    assert provenance["packages"]["xxhash"]


def test_report_of_a_busy_machine_is_not_valid(capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(GOOD, cpu=replace(QUIET, foreign_share=0.051))
    assert finish(busy, options("--json")) == 1
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert content["valid"] is False
    assert "5.1%" in content["problems"][0]
    assert content["speed_ratio"] == 0.5


def test_report_without_pinning_is_not_valid() -> None:
    assert "cores" in replace(GOOD, pinned_cores={}).all_problems()[0]


def test_report_keeps_the_problems_of_the_benchmark() -> None:
    assert replace(GOOD, problems=["no package"]).to_json()["problems"] == ["no package"]


def test_report_figure_with_the_name_of_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="valid"):
        replace(GOOD, figures={"valid": 1.0}).to_json()


def test_finish_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(GOOD, options("--json")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["bench"] == "sample"
    assert "speed_ratio" in printed.err


def test_finish_save_and_output_write_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "deep" / "mine.json"
    assert finish(GOOD, options("--json", "--save", "--output", str(output)), tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    assert json.loads(output.read_text(encoding="utf-8")) == printed
    assert json.loads((tmp_path / f"sample-{date}.json").read_text(encoding="utf-8")) == printed
