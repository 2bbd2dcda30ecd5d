"""Sharded embedding tables with a replicated hot tier and exact pre-fetching.

Measure, plan, explain, run, verify::

    stats = AccessStats.from_batches(batches, tables)
    plan = plan_tiers(stats, interconnect, tables, world_size=4, batch_size=512, optimizer=RowWiseAdagrad(lr=0.01))
    embeddings = TieredEmbeddingBagCollection(tables, plan, optimizer=RowWiseAdagrad(lr=0.01))
    with PrefetchPipeline(model, dense_optimizer, embeddings) as pipe:
        for batch in pipe(loader):
            ...
"""

from __future__ import annotations

from recsys_embed._version import __version__
from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.errors import (
    IdRangeError,
    InputError,
    PipelineError,
    PlanMismatchError,
    RecsysEmbedError,
)
from recsys_embed.optimizers import SGD, Adagrad, Adam, Momentum, RowWiseAdagrad, make_optimizer
from recsys_embed.plan import Plan
from recsys_embed.planner import plan_tiers
from recsys_embed.prefetch import PrefetchPipeline
from recsys_embed.profile import AccessStats
from recsys_embed.race import RaceResult, race_tiers
from recsys_embed.tables import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from recsys_embed.work import WorkCosts

__all__ = [
    "SGD",
    "AccessStats",
    "Adagrad",
    "Adam",
    "EmbeddingBagConfig",
    "IdRangeError",
    "InputError",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Momentum",
    "PipelineError",
    "Plan",
    "PlanMismatchError",
    "PrefetchPipeline",
    "RaceResult",
    "RecsysEmbedError",
    "RowWiseAdagrad",
    "TieredEmbeddingBagCollection",
    "WorkCosts",
    "__version__",
    "make_optimizer",
    "plan_tiers",
    "race_tiers",
]
