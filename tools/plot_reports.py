"""Draw the plots of the benchmark reports from their own tables, or check that the plots show what the tables say.

    python tools/plot_reports.py             # draw what is missing or out of date
    python tools/plot_reports.py --check     # end with 1 when a plot is missing or out of date

A report asks for a plot below a table, ``<!-- plot: peer over ours -->``; names of several columns are separated by
semicolons. Each row of the table with a number there becomes a group of bars; of a cell such as ``1.87 / 1.81`` the
first number counts. The picture stands beside the report under its name, with its values in the file's description.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

REPORTS = Path(__file__).resolve().parents[1] / "benchmarks" / "reports"
_MARK = re.compile(r"^<!-- plot: (?P<columns>.+?) -->\n(?:\n?!\[[^\]]*\]\([^)]*\)\n)?", re.MULTILINE)
_FIRST_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
_VALUES = re.compile(r"<dc:description>(.*?)</dc:description>", re.DOTALL)

Values = dict[str, list[list]]
"""Per column, pairs of a row's words and its number."""


@dataclass(frozen=True)
class Plot:
    """One plot that a report asks for.

    Attributes:
        path: The picture.
        title: Of the section the table stands in.
        values: What it shows.
        start: Where the mark and the picture's line begin in the report.
        stop: Where they end.
        text: What should stand there.
    """

    path: Path
    title: str
    values: Values
    start: int
    stop: int
    text: str


def plots(report: Path) -> list[Plot]:
    """Return the plots a report asks for.

    Raises:
        SystemExit: There is no table above a mark, or the table has no such column, or no number in it.
    """
    text, found = report.read_text(), []
    for number, mark in enumerate(_MARK.finditer(text), 1):
        columns = [name.strip() for name in mark["columns"].split(";")]
        before = text[: mark.start()]
        tables = re.findall(r"(?:^\|.*\n)+", before, re.MULTILINE)
        if not tables:
            raise SystemExit(f"{report.name}: no table stands above 'plot: {mark['columns']}'; move the mark below one")
        path = report.with_name(f"{report.stem}{'' if number == 1 else f'_{number}'}.svg")
        title = re.findall(r"^#+ (.+)$", before, re.MULTILINE)[-1]
        line = f"<!-- plot: {mark['columns']} -->\n\n![{'; '.join(columns)}]({path.name})\n"
        found.append(Plot(path, title, _read(tables[-1], columns, report.name), mark.start(), mark.end(), line))
    return found


def _read(table: str, columns: list[str], where: str) -> Values:
    lines = [[c.strip() for c in line.strip().strip("|").split("|")] for line in table.splitlines()]
    heads, rows = lines[0], lines[2:]
    for column in columns:
        if column not in heads:
            raise SystemExit(f"{where}: column {column!r} is not in the table above; expected one of {heads}")
    labels = _labels(rows, min(map(heads.index, columns)))
    values: Values = {column: [] for column in columns}
    for column in columns:
        for label, row in zip(labels, rows, strict=True):
            if match := _FIRST_NUMBER.search(row[heads.index(column)]):
                values[column].append([label, float(match[0].replace(",", ""))])
        if not values[column]:
            raise SystemExit(f"{where}: column {column!r} holds no number; name another")
    return values


def _labels(rows: list[list[str]], stop: int) -> list[str]:
    """Name rows by their cells before a column: by the words among them, where that tells all rows apart."""
    heads = list(itertools.accumulate((row[0] for row in rows), lambda above, cell: cell or above))
    cells = [[head, *row[1:stop]] for head, row in zip(heads, rows, strict=True)]
    words = [[head, *(cell for cell in rest if not _FIRST_NUMBER.match(cell))] for head, *rest in cells]
    named = [", ".join(filter(None, row)).replace("`", "") for row in words]
    if len(set(named)) == len(named):
        return named
    return [", ".join(filter(None, row)).replace("`", "") for row in cells]


def shown(path: Path) -> Values | None:
    """Return the values in a picture's description, ``None`` without a picture."""
    match = _VALUES.search(path.read_text()) if path.exists() else None
    return json.loads(html.unescape(match[1])) if match else None


def draw(plot: Plot) -> None:
    """Write a picture: bars to the right, a logarithmic axis where the values span more than a factor of 20."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "sextet", "svg.fonttype": "none"})
    from matplotlib import pyplot

    labels = list(dict.fromkeys(row for rows in plot.values.values() for row, _ in rows))
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.3 * len(labels) * len(plot.values) ** 0.5))
    height = 0.8 / len(plot.values)
    for position, (column, rows) in enumerate(plot.values.items()):
        places = [labels.index(row) + (position - (len(plot.values) - 1) / 2) * height for row, _ in rows]
        bars = axes.barh(places, [value for _, value in rows], height, label=column)
        axes.bar_label(bars, [f"{value:g}" for _, value in rows], padding=3, fontsize=8)
    numbers = [value for rows in plot.values.values() for _, value in rows]
    if min(numbers) > 0 and max(numbers) > 20 * min(numbers):
        axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(plot.title, fontsize=10)
    axes.set_xlabel(next(iter(plot.values))) if len(plot.values) == 1 else axes.legend(fontsize=8)
    figure.savefig(plot.path, bbox_inches="tight", metadata={"Date": None, "Description": json.dumps(plot.values)})
    pyplot.close(figure)


def problems(folder: Path) -> list[str]:
    """List plots that are missing, out of date, or not shown on their page."""
    return [
        f"{plot.path.name} does not show what {report.name} says; run python tools/plot_reports.py"
        for report in sorted(folder.glob("*.md"))
        for plot in plots(report)
        if shown(plot.path) != plot.values or report.read_text()[plot.start : plot.stop] != plot.text
    ]


def main(argv: list[str] | None = None) -> int:
    """Draw or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing")
    if parser.parse_args(argv).check:
        print("\n".join(problems(REPORTS)) or "every plot shows what its table says")
        return int(bool(problems(REPORTS)))
    for report in sorted(REPORTS.glob("*.md")):
        text = report.read_text()
        for plot in reversed(plots(report)):
            text = text[: plot.start] + plot.text + text[plot.stop :]
            if shown(plot.path) != plot.values:
                draw(plot)
                print(f"drawn: {plot.path.name}")
        if text != report.read_text():
            report.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
