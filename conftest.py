"""What all tests of the workspace share: where two workers run them, those of one package stay together, in order."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest


def group_of(nodeid: str) -> str:
    """Return the package that a test belongs to; for tests elsewhere the folder at the top.

    >>> group_of("packages/gnn-eval/tests/unit/test_plan.py::test_a_plan"), group_of("tests/test_tools.py::test_a_tool")
    ('gnn-eval', 'tests')
    """
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return parts[1] if parts[0] == "packages" else parts[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let pytest-xdist keep a package on one worker: its pools of ranks start once, and its tests keep their order."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadPackageScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return LoadPackageScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
