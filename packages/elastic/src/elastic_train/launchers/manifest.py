"""Text of manifests, and what the names and numbers in them may be."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from elastic_train.errors import input_error

__all__ = ["check_name", "check_workers", "to_yaml"]

_PLAIN = re.compile(r"[A-Za-z][\w./-]*( [\w./-]+)*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


def check_name(name: str) -> None:
    """Refuse a name that is none of a host's: it becomes part of addresses and lines of scripts."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        expected = "a lower-case letter, then letters, digits and -, at most 50"
        raise input_error("name", name, expected, "choose a name such as train-7")


def check_workers(command: Sequence[str], min_workers: int, max_workers: int, drain_seconds: int) -> None:
    """Refuse a command and limits that cannot be."""
    if not command or any("\0" in part for part in command):
        raise input_error("command", list(command), "a program and its arguments", "name the training script")
    if not 1 <= min_workers <= max_workers:
        raise input_error("min_workers", min_workers, f"between 1 and max_workers={max_workers}", "correct them")
    if drain_seconds < 1:
        raise input_error("drain_seconds", drain_seconds, "at least 1", "use twice the time of a step, or 120")


def to_yaml(value: Any, indent: int = 0) -> str:
    """Return JSON-able values as YAML; what might be read as something else is quoted.

    >>> print(to_yaml({"kind": "Job", "args": ["a: b", "on"], "spec": {"size": 2, "none": {}}}))
    kind: Job
    args:
      - "a: b"
      - "on"
    spec:
      size: 2
      none: {}
    """
    pad, lines = " " * indent, []
    entries = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in entries:
        head = f"{pad}-" if key is None else f"{pad}{_scalar(key)}:"
        if isinstance(item, dict | list | tuple) and item:
            inner = to_yaml(item, indent + 2)
            # The first entry of a list's mapping stands beside its dash.
            lines.append(f"{head} {inner.lstrip()}" if key is None and isinstance(item, dict) else f"{head}\n{inner}")
        else:
            lines.append(f"{head} {_scalar(item)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
