"""Picks and runs the fastest of four ways to parallelise sampled GNN training.

Measure, plan, explain, run, verify::

    plan = gnn_parallel.plan(graph, model, features=x, partition=book, fanouts=[10, 10], batch_size=1024, group=group)
    engine = gnn_parallel.Engine(plan, model, group)
    for batch in engine.loader(train_ids, labels):
        optimizer.zero_grad()
        engine.backward(cross_entropy(engine(batch), batch.y))
        optimizer.step()
"""

from __future__ import annotations

from gnn_parallel._version import __version__
from gnn_parallel.adapters import register_adapter, split_layer
from gnn_parallel.checkpoint import load_checkpoint, save_checkpoint
from gnn_parallel.cost_model import Rates
from gnn_parallel.dropout import keyed_dropout
from gnn_parallel.engine import Batch, Engine
from gnn_parallel.errors import GnnParallelError, InputError, PlanMismatchError, UnsupportedLayerError
from gnn_parallel.layers import ProjectedSplit, SplitLayer, WholeLayer
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.models import SampledGNN, make_model
from gnn_parallel.plan import Candidate, Plan
from gnn_parallel.planner import choose_strategy as plan
from gnn_parallel.softmax_split import SoftmaxSplit
from gnn_parallel.trial import try_strategies
from gnn_parallel.verify import verify_strategies
from gnn_parallel.vertex_split import VertexSplit

__all__ = [
    "Batch",
    "Candidate",
    "Engine",
    "GnnParallelError",
    "InputError",
    "LinearSplit",
    "Plan",
    "PlanMismatchError",
    "ProjectedSplit",
    "Rates",
    "SampledGNN",
    "SoftmaxSplit",
    "SplitLayer",
    "UnsupportedLayerError",
    "VertexSplit",
    "WholeLayer",
    "__version__",
    "keyed_dropout",
    "load_checkpoint",
    "make_model",
    "plan",
    "register_adapter",
    "save_checkpoint",
    "split_layer",
    "try_strategies",
    "verify_strategies",
]
