"""What an example tells: a question, what was measured, the plan in words and plots; printed, or as one HTML file."""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import io
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core_kernels.console import say, table


@dataclass
class Chapter:
    """One example's result.

    Attributes:
        package: The package it is about.
        question: The user's problem in one line.
        rows: What was measured, and the value.
        text: The plan in words, or whatever else is worth reading.
        figures: matplotlib figures.
        seconds: How long it took.
    """

    package: str
    question: str
    rows: list[tuple[str, str]]
    text: str = ""
    figures: list[Any] = field(default_factory=list)
    seconds: float = 0.0


def new_figure(width: float = 6.0, height: float = 3.0, num_axes: int = 1) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes side by side, made without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, num_axes)


def shown_error(error: float) -> str:
    """Write a difference in one digit.

    >>> shown_error(0.0), shown_error(3.1e-7)
    ('none', '3e-07')
    """
    return "none" if error == 0 else f"{error:.0e}"


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option every example has; end at once where plots cannot be drawn, not at the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "matplotlib is not installed, every example draws with it; run pip install "
            '"./packages/core-kernels[data,partition,plot]" -c constraints/cpu.txt'
        )
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--report", metavar="FILE.html", type=Path, help="write the result with its plots to one file")
    return made


def tell(chapter: Chapter) -> None:
    """Print a chapter."""
    if chapter.text:
        say(chapter.text)
    table(f"{chapter.package}: {chapter.question}", ("measured", "value"), chapter.rows)


def finish(chapters: Iterable[Chapter], report: Path | None, is_told: bool = True) -> None:
    """Print chapters and write the report, if one is asked for."""
    chapters = list(chapters)
    if is_told:
        for chapter in chapters:
            tell(chapter)
    if report:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(render(chapters))
        say(f"report with plots: {report.absolute()}")


def render(chapters: list[Chapter]) -> str:
    """Return one HTML page that needs no other file."""
    machine = (
        f"{os.cpu_count()} {platform.machine()} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}"
    )
    parts = [_HEAD, f"<h1>Sextet, measured here</h1><p>{html.escape(machine)}</p>"]
    parts.append("<table><tr><th>package</th><th>measured</th><th>value</th></tr>")
    for chapter in chapters:
        for what, value in chapter.rows:
            cells = (chapter.package, what, value)
            parts.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    parts.append("</table>")
    for chapter in chapters:
        parts.append(f"<h2>{html.escape(chapter.package)}: {html.escape(chapter.question)}</h2>")
        parts += [f'<img alt="plot" src="data:image/png;base64,{_as_png(figure)}">' for figure in chapter.figures]
        if chapter.text:
            parts.append(f"<pre>{html.escape(chapter.text)}</pre>")
    return "\n".join([*parts, "</body></html>", ""])


def _as_png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sextet, measured here</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid #ddd }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 13px } img { max-width: 100%; display: block }
</style></head><body>"""
