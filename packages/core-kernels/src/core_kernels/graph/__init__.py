"""Graphs for message passing: :class:`Graph`, and :class:`Block` for one layer of a sampled or cut-out part.

Both store in-edges grouped by destination. Node data never lives inside; edge-wise tensors next to a graph are indexed
by edge id, the position of the edge in the list the user gave.
"""

from __future__ import annotations

from core_kernels.graph.block import Block
from core_kernels.graph.structure import Graph

__all__ = ["Block", "Graph"]
