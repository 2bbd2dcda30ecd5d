"""What happened in a job, from its events: a summary, a page for the terminal, a page for the browser."""

from elastic_train.report.html import render_html
from elastic_train.report.summary import Change, Pause, Run, Span, summarize
from elastic_train.report.terminal import watch

__all__ = ["Change", "Pause", "Run", "Span", "render_html", "summarize", "watch"]
