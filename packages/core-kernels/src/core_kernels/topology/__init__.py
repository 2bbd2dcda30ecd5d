"""The measured or described machine that planners share: devices, switches, hosts and the links between them."""

from __future__ import annotations

from core_kernels.topology.drawing import draw, pair_table
from core_kernels.topology.load import load_topology, processor_topology
from core_kernels.topology.model import ContentionGroup, Link, Node, Topology, TopologyError, UnreachablePairError
from core_kernels.topology.presets import PRESETS, cluster, preset

__all__ = [
    "PRESETS",
    "ContentionGroup",
    "Link",
    "Node",
    "Topology",
    "TopologyError",
    "UnreachablePairError",
    "cluster",
    "draw",
    "load_topology",
    "pair_table",
    "preset",
    "processor_topology",
]
