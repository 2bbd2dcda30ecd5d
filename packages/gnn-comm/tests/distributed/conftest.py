from __future__ import annotations

import pytest

from core_kernels.testing import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Four ranks for the whole session; tests of fewer ranks use sub-groups."""
    with RankPool(4, timeout_seconds=60.0) as pool:
        yield pool
