"""Turns an unmodified GNN into exact layer-wise evaluation, also out of core."""

from gnn_eval._version import __version__
from gnn_eval.containers import Bipartite, Blocks
from gnn_eval.conversion import convert
from gnn_eval.errors import EvaluationArgumentError, GnnEvalError, InexactPlanError, UnsupportedModelError
from gnn_eval.evaluation import evaluate, score_links
from gnn_eval.plan import Plan
from gnn_eval.planner import compile
from gnn_eval.registry import LayerSpec, register
from gnn_eval.stored_graph import StoredGraph

__all__ = [
    "Bipartite",
    "Blocks",
    "EvaluationArgumentError",
    "GnnEvalError",
    "InexactPlanError",
    "LayerSpec",
    "Plan",
    "StoredGraph",
    "UnsupportedModelError",
    "__version__",
    "compile",
    "convert",
    "evaluate",
    "register",
    "score_links",
]
