"""Picks and runs the fastest of four ways to parallelise sampled GNN training."""

from gnn_parallel._version import __version__

__all__ = ["__version__"]
