"""Turns an unmodified GNN into exact layer-wise evaluation, also out of core."""

from gnn_eval._version import __version__

__all__ = ["__version__"]
