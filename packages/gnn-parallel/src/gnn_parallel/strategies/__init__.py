"""The four ways to spread the input layer over ranks."""

from __future__ import annotations

from gnn_parallel.strategies.base import Context, Strategy
from gnn_parallel.strategies.dnp import DestinationNodeParallel
from gnn_parallel.strategies.gdp import GraphDataParallel
from gnn_parallel.strategies.nfp import NodeFeatureParallel
from gnn_parallel.strategies.snp import SourceNodeParallel

__all__ = [
    "STRATEGIES",
    "Context",
    "DestinationNodeParallel",
    "GraphDataParallel",
    "NodeFeatureParallel",
    "SourceNodeParallel",
    "Strategy",
]

STRATEGIES: dict[str, type[Strategy]] = {
    "gdp": GraphDataParallel,
    "nfp": NodeFeatureParallel,
    "snp": SourceNodeParallel,
    "dnp": DestinationNodeParallel,
}
