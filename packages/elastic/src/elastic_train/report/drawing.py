"""Pages and small drawings as text, without another library: bars in rows, and lines that step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["COLORS", "draw_page", "draw_rows", "draw_steps"]

COLORS = ("#3b6ea5", "#d08a2e", "#4f9a62", "#a34a5e", "#7a63a8", "#5f6b73")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; }
svg { width: 100%; font-size: 12px; } .grid { stroke: #ddd; } .tick { fill: #666; font-size: 11px; }
.mark { stroke: #a34a5e; stroke-dasharray: 3 3; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: 2px 10px 2px 0; }
tr + tr { border-top: 1px solid #eee; } th { font-weight: 600; } td { font-variant-numeric: tabular-nums; }
p.note { color: #666; } details { margin-top: 1em; }
"""
_WIDTH, _LEFT, _RIGHT, _ROW = 860, 110, 14, 22


def draw_page(title: str, parts: Sequence[tuple[str, str]]) -> str:
    """Return an HTML page that needs nothing outside of it.

    Args:
        title: Its heading, plain text.
        parts: Headings, empty for none, and what stands below them as HTML.
    """
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    body = "".join((f"<h2>{escape(name)}</h2>" if name else "") + content for name, content in parts)
    return f"{head}<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


def _scale(end: float) -> float:
    return (_WIDTH - _LEFT - _RIGHT) / max(end, 1e-9)


def _axis(end: float, top: float, bottom: float, unit: str) -> list[str]:
    """Return upright lines with their times."""
    parts = []
    for tick in _ticks(end):
        x = _LEFT + tick * _scale(end)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        place = f'x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{tick:g} {unit}</text>')
    return parts


def _ticks(end: float, most: int = 8) -> list[float]:
    """Return round numbers from 0 to ``end``.

    >>> _ticks(10.0)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if end <= 0:
        return [0.0]
    step = 10.0 ** len(str(int(end)))
    while end / step < most / 2:
        step /= 2 if f"{step:e}"[0] in "12" else 2.5
    return [round(index * step, 12) for index in range(int(end / step + 1e-9) + 1)]


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def draw_rows(
    rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]],
    end: float,
    marks: Sequence[tuple[float, str]] = (),
    label: str = "timeline",
    unit: str = "s",
) -> str:
    """Draw bars over time, one row each.

    Args:
        rows: Names, and bars of begin, end, color and text that is shown on pointing.
        end: Time at the right edge.
        marks: Times of dashed lines through all rows, with text.
        label: What the drawing is, for readers of screens.
        unit: Unit of times.
    """
    bottom = 8 + _ROW * len(rows)
    parts = _axis(end, 8, bottom, unit)
    for index, (name, bars) in enumerate(rows):
        y = 8 + _ROW * index
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name[:16])}</text>')
        for begin, stop, color, text in bars:
            x, width = _LEFT + begin * _scale(end), max((stop - begin) * _scale(end), 1.0)
            place = f'x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{_ROW - 8}"'
            parts.append(f'<rect {place} fill="{escape(color, quote=True)}"><title>{escape(text)}</title></rect>')
    for at, text in marks:
        x = _LEFT + at * _scale(end)
        line = f'<line class="mark" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom:.1f}">'
        parts.append(f"{line}<title>{escape(text)}</title></line>")
    return _svg(bottom + 20, parts, label)


def draw_steps(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    end: float,
    label: str,
    unit: str = "s",
    height: float = 130.0,
) -> str:
    """Draw values that hold until the next one, one color per line.

    Args:
        lines: Names, and pairs of time and value in order of time.
        end: Time at the right edge.
        label: What the values are.
        unit: Unit of times.
        height: Height of the drawing, in the unit of its width of 860.
    """
    most = max((value for _, points in lines for _, value in points), default=0.0) or 1.0
    bottom = height - 20
    parts = _axis(end, 8, bottom, unit)
    for value in (0.0, most / 2, most):
        y = bottom - (bottom - 12) * value / most
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for index, (name, points) in enumerate(lines):
        path, before = [], None
        for at, value in [*points, (end, points[-1][1])] if points else []:
            x, y = _LEFT + min(at, end) * _scale(end), bottom - (bottom - 12) * value / most
            path.append(f"M{x:.1f} {y:.1f}" if before is None else f"L{x:.1f} {before:.1f}L{x:.1f} {y:.1f}")
            before = y
        color = COLORS[index % len(COLORS)]
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if len(lines) > 1:
            place = f'x="{_LEFT + 6 + 150 * index}" y="{height - 2:.0f}"'
            parts.append(f'<text {place} fill="{color}">{escape(name)}</text>')
    return _svg(height + 16, parts, label)
