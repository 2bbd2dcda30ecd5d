"""Every benchmark report names machine, versions and command, holds tables that can be compared, and shows a plot."""

from __future__ import annotations

import re
from pathlib import Path

import compare_reports
import plot_reports
import pytest

ROOT = Path(__file__).resolve().parents[1]
REPORTS = sorted((ROOT / "benchmarks" / "reports").glob("*.md"))
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
TABLE = "# Speed\n\n| op | rows | peer over ours |\n|---|---|---|\n| spmm | 5 | 4.0x |\n| | 9 | 2 / 3 |\n\n"


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_report_can_be_repeated_and_compared(report):
    text = report.read_text()
    assert re.search(r"\bcores?\b", text), "name the machine"
    assert re.search(r"Python 3\.\d+", text), "name the version of Python"
    assert re.search(r"torch 2\.\d+", text), "name the version of torch"
    commands = re.findall(r"^    +((?:python|nox|[a-z]+-[a-z]+|autopar) .+)$", text, re.MULTILINE)
    assert commands, "show the command that measures it, indented by four spaces"
    for script in re.findall(r"python (\S+\.py)", "\n".join(commands)):
        assert (ROOT / script).exists(), script
    assert compare_reports.read_lines(report)
    assert plot_reports.plots(report), "ask for a plot below a table: <!-- plot: COLUMN -->"


def test_plots_show_what_their_tables_say():
    assert plot_reports.problems(ROOT / "benchmarks" / "reports") == []


def test_every_package_has_a_report_and_every_report_is_listed():
    listed = re.findall(r"^\| `(\w[\w-]+\.md)` \| ([\w-]+) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == [report.name for report in REPORTS]
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert {package.removesuffix("-train") for _, package in listed} == packages


def test_a_plot_that_is_missing_or_out_of_date_is_found(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; the extra plot brings it")
    report = tmp_path / "a_cpu_202611.md"
    report.write_text(TABLE + "<!-- plot: peer over ours -->\n")
    (plot,) = plot_reports.plots(report)
    assert plot.values == {"peer over ours": [["spmm, 5", 4.0], ["spmm, 9", 2.0]]}
    assert len(plot_reports.problems(tmp_path)) == 1
    plot_reports.draw(plot)
    report.write_text(TABLE + plot.text)
    assert plot_reports.problems(tmp_path) == []
    report.write_text(report.read_text().replace("4.0x", "5.0x"))
    assert len(plot_reports.problems(tmp_path)) == 1


@pytest.mark.parametrize("column", ["peer over us", "op"])
def test_a_plot_of_a_column_without_numbers_is_refused(tmp_path, column):
    report = tmp_path / "a.md"
    report.write_text(TABLE + f"<!-- plot: {column} -->\n")
    with pytest.raises(SystemExit, match=column):
        plot_reports.plots(report)
