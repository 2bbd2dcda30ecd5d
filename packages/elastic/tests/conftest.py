"""Paths and workloads shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from elastic_train.scheduler import Workload, amdahl_curve


@pytest.fixture(scope="session")
def traces() -> Path:
    """Return the folder of public traces, named by ``SEXTET_DATA`` or beside the repository; skip without it."""
    root = Path(os.environ.get("SEXTET_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
    if not (root / "traces").is_dir():
        pytest.skip(f"no folder of traces at {root / 'traces'}; name its parent in SEXTET_DATA")
    return root / "traces"


@pytest.fixture
def make_workload():
    """Return a function that makes random jobs in ``num_groups`` groups."""

    def make(num_jobs: int = 40, num_gpus: int = 16, seed: int = 0, num_groups: int = 1) -> Workload:
        rng = np.random.default_rng(seed)
        requested = rng.integers(1, max(num_gpus // 2, 2), num_jobs)
        return Workload(
            submit_seconds=np.concatenate([[0.0], np.sort(rng.uniform(0, 3600 * 4, num_jobs - 1))]),
            work=rng.lognormal(8.0, 1.0, num_jobs),
            requested=requested,
            min_gpus=np.ones(num_jobs, dtype=np.int64),
            max_gpus=np.minimum(requested * 2, num_gpus),
            curve=rng.integers(0, 2, num_jobs),
            curves=np.stack([amdahl_curve(num_gpus, 0.02), amdahl_curve(num_gpus, 0.2)]),
            group=rng.integers(0, num_groups, num_jobs),
        )

    return make
