"""GNN layers with the constructors, parameter shapes and state-dict keys of PyTorch Geometric, run by fused kernels.

Call ``conv(graph, x)`` with a :class:`core_kernels.Graph` or a :class:`core_kernels.Block`. Every message-passing layer
is a vertex program (:mod:`core_kernels.vertex`), shown by its ``program`` attribute.
"""

from core_kernels.nn.gat import GATConv, GATv2Conv
from core_kernels.nn.gcn import APPNP, GCNConv, weighted_degrees
from core_kernels.nn.gin import GINConv
from core_kernels.nn.hap import HAPCoarsening
from core_kernels.nn.rgcn import RGCNConv
from core_kernels.nn.sage import SAGEConv

__all__ = [
    "APPNP",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "HAPCoarsening",
    "RGCNConv",
    "SAGEConv",
    "weighted_degrees",
]
