"""Ranks, tables and batches shared by the tests of this package."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from core_kernels.testing import RankPool
from recsys_embed import EmbeddingBagConfig, KeyedJaggedTensor


@pytest.fixture(scope="session")
def pools():
    """Return a function from world size to ranks that stay up for the session."""
    made = {}

    def pool(world_size):
        if world_size not in made:
            made[world_size] = RankPool(world_size)
        return made[world_size]

    yield pool
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="session")
def tables():
    """Two widths, a shared table, both poolings."""
    return [
        EmbeddingBagConfig("film", 60, 8, ["seen", "liked"]),
        EmbeddingBagConfig("tag", 40, 8, ["tags"], pooling="mean"),
        EmbeddingBagConfig("user", 25, 4, ["who"]),
    ]


@pytest.fixture(scope="session")
def make_batches(tables):
    """Return a function that draws multi-hot batches with skewed ids and empty bags."""

    def make(num_batches, size, seed=0, weighted=False):
        generator = np.random.default_rng(seed)
        rows = {f: t.num_embeddings for t in tables for f in t.feature_names}
        keys = ["who", "seen", "tags", "liked"]
        batches = []
        for _ in range(num_batches):
            lengths = generator.integers(0, 4, (len(keys), size))
            values = [(rows[k] * generator.random(lengths[i].sum()) ** 3).astype(np.int64) for i, k in enumerate(keys)]
            weights = torch.from_numpy(generator.random(lengths.sum()).astype(np.float32)) if weighted else None
            ids = torch.from_numpy(np.concatenate(values))
            batches.append(KeyedJaggedTensor(keys, ids, torch.from_numpy(lengths.reshape(-1)), weights))
        return batches

    return make


@pytest.fixture(scope="session")
def criteo():
    """Return the real Criteo rows, or skip where they are not."""
    folder = os.environ.get("SEXTET_DATA") or Path(__file__).parents[4] / "shared" / "data"
    path = Path(folder) / "criteo_8192.npz"
    if not path.is_file():
        pytest.skip(f"there is no {path}; set SEXTET_DATA to the folder that holds criteo_8192.npz")
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
