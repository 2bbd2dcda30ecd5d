"""Plans and runs full-graph embedding exchange over the real topology.

::

    topology = gnn_comm.Topology.load("auto")
    parts = gnn_comm.partition(graph, topology)
    plan = gnn_comm.plan(parts, topology)
    print(plan.explain())
    communicator = gnn_comm.Communicator(plan)  # on every rank
    rows = communicator.graph_all_gather(communicator.dispatch(features))
"""

from core_kernels.topology import Topology, TopologyError, UnreachablePairError
from gnn_comm._version import __version__
from gnn_comm.communicator import Communicator, GatherHandle
from gnn_comm.errors import GnnCommArgumentError, GnnCommError, PlanCheckError, PlanMismatchError
from gnn_comm.partitioning import Partition, partition
from gnn_comm.plan import Plan, Stage
from gnn_comm.planner import plan  # last: the function takes the name of the sub-module

__all__ = [
    "Communicator",
    "GatherHandle",
    "GnnCommArgumentError",
    "GnnCommError",
    "Partition",
    "Plan",
    "PlanCheckError",
    "PlanMismatchError",
    "Stage",
    "Topology",
    "TopologyError",
    "UnreachablePairError",
    "__version__",
    "partition",
    "plan",
]
