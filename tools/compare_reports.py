"""Compare two benchmark reports line by line; end with 1 when a line is worse by more than a given share.

    python tools/compare_reports.py before.json after.json --worse 0.1
    python tools/compare_reports.py benchmarks/reports/a.md benchmarks/reports/b.md

A report is a JSON file of results or a Markdown page with tables. A line is a number with its path: keys and, in lists,
the names found in the entry (``results[spmm sum].ours_ms``); in a table, the row's first cells and the column's head.
What is better follows from the unit in the name: less for seconds, milliseconds, bytes, errors; more for rates, ratios
of a peer over ours, accuracies. Lines whose name says neither, and those of one report alone, are shown and not judged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The first match decides; a rate ends in "_per_second" although "second" alone means that less is better.
_MORE = re.compile(
    r"per[_ ]s(ec|$|\b)|samples/s|rows/s|throughput|peer[_ ]over|over[_ ]ours|speed-?up|accuracy|\bauc\b|recall"
    r"|utili[sz]ation|hit[_ ]rate|restart[_ ]over",
    re.IGNORECASE,
)
_LESS = re.compile(
    r"seconds|(^|[_ ,.(])(ms|us|s|mb|kb|gb|mib|gib)\b|bytes|memory|error|difference|pause|wait|step\b|epoch\b|regret"
    r"|of the (peer|time)|over the bound|latency",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"^[~<]?\s*([-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)\s*(%|[a-zA-Zµ/]*)$")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10,
          "MiB": 2**20, "GiB": 2**30, "%": 0.01, "": 1.0}  # fmt: skip


def read_lines(path: Path) -> dict[str, float]:
    """Return every number of a report by its path.

    Raises:
        SystemExit: The file holds no numbers in a form that is known.
    """
    text = path.read_text()
    lines = dict(_json_lines(json.loads(text), "")) if path.suffix == ".json" else dict(_table_lines(text))
    if not lines:
        raise SystemExit(f"{path} holds no numbers: expected JSON results or a page with tables; check the file")
    return lines


def _json_lines(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _json_lines(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _json_lines(item, f"{name}[{_label(item, position)}]")


def _label(item: Any, position: int) -> str:
    """Name a list's entry by its own texts, so that a new entry in the middle shifts nothing."""
    texts = [str(v) for v in item.values() if isinstance(v, str)] if isinstance(item, dict) else []
    return " ".join(texts[:3]) or str(position)


def _table_lines(text: str) -> Iterator[tuple[str, float]]:
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [
            [c.strip().replace("**", "") for c in line.strip().strip("|").split("|")] for line in table.splitlines()
        ]
        heads, rows = lines[0], [cells for cells in lines[2:] if len(cells) == len(lines[0])]
        # An empty first cell belongs to the row above it.
        firsts = itertools.accumulate((cells[0] for cells in rows), lambda above, cell: cell or above)
        rows = [[first, *cells[1:]] for first, cells in zip(firsts, rows, strict=True)]
        for name, cells in zip(_row_names(rows), rows, strict=True):
            for head, cell in zip(heads, cells, strict=True):
                number = _read_number(cell)
                if number is not None:
                    yield f"{name}: {head}", number


def _row_names(rows: list[list[str]]) -> list[str]:
    """Name rows by their words; where that does not tell all apart, by as many first cells as do."""
    names = [", ".join(cell for cell in cells if cell and _read_number(cell) is None) for cells in rows]
    num_cells = 1
    while len(set(names)) < len(names) and rows and num_cells <= len(rows[0]):
        names = [", ".join(cells[:num_cells]) for cells in rows]
        num_cells += 1
    return names


def _read_number(cell: str) -> float | None:
    match = _NUMBER.match(cell.strip("`"))
    if match is None or match[2] not in _UNITS:
        return None
    return float(match[1].replace(",", "")) * _UNITS[match[2]]


def direction(name: str) -> int:
    """Return 1 when more is better, -1 when less is, 0 when the name does not say.

    >>> direction("ours_seconds"), direction("samples_per_second"), direction("num_rows")
    (-1, 1, 0)
    """
    last = re.split(r"[.:\]]", name)[-1].strip() or name
    for text in (last, name):
        if _MORE.search(text):
            return 1
        if _LESS.search(text):
            return -1
    return 0


def compare(before: dict[str, float], after: dict[str, float], share: float) -> list[tuple[str, float, float, str]]:
    """Return (line, after over before, share by which it is worse, verdict) of each common line."""
    rows = []
    for name in before:
        if name not in after or before[name] == 0:
            continue
        ratio = after[name] / before[name]
        sign = direction(name)
        worse = (ratio - 1 if sign < 0 else 1 / ratio - 1 if ratio > 0 else math.inf) if sign else 0.0
        verdict = "not judged" if not sign else "WORSE" if worse > share else "better" if worse < -share else "same"
        rows.append((name, ratio, worse, verdict))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Compare; returns 1 when a line is worse, 2 when nothing could be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--worse", type=float, default=0.15, metavar="SHARE", help="tolerated (default %(default)s)")
    args = parser.parse_args(argv)
    before, after = read_lines(args.before), read_lines(args.after)
    rows = compare(before, after, args.worse)
    if not any(verdict != "not judged" for *_, verdict in rows):
        print(f"{args.before} and {args.after} have no line in common that can be judged; compare runs of one command")
        return 2
    width = max(len(name) for name, *_ in rows)
    for name, ratio, _, verdict in rows:
        print(f"{name:<{width}}  {ratio:8.3f}  {verdict}")
    for name in sorted(set(before) ^ set(after)):
        print(f"{name:<{width}}  only in {args.before if name in before else args.after}")
    num_worse = sum(verdict == "WORSE" for *_, verdict in rows)
    print(f"{len(rows)} lines compared, after over before; {num_worse} worse by more than {args.worse:.0%}")
    return int(num_worse > 0)


if __name__ == "__main__":
    sys.exit(main())
