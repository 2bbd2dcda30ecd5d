"""A pytest plugin that writes down every error that ``pytest.raises`` catches: package, class, message, as JSON lines.

SEXTET_MESSAGES=messages.jsonl PYTHONPATH=tools pytest -p error_recorder packages/*/tests/unit/test_wrong_calls.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_raises = pytest.raises
_package = ""


class Recorded:
    """What ``pytest.raises`` returns, and on its way out a line in the file."""

    def __init__(self, inner: Any):
        self._inner, self._caught = inner, None

    def __enter__(self) -> Any:
        self._caught = self._inner.__enter__()
        return self._caught

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        is_expected = self._inner.__exit__(kind, error, trace)
        if is_expected and error is not None:
            line = {"package": _package, "error": type(error).__name__, "message": str(error)}
            with open(os.environ["SEXTET_MESSAGES"], "a") as file:
                file.write(json.dumps(line) + "\n")
        return is_expected


def pytest_configure(config: pytest.Config) -> None:
    """Record from now on."""
    pytest.raises = lambda *args, **settings: Recorded(_raises(*args, **settings))  # type: ignore[assignment]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give pytest its own function back."""
    pytest.raises = _raises


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note whose test runs."""
    global _package
    parts = Path(item.path).parts
    _package = parts[parts.index("packages") + 1] if "packages" in parts else ""
