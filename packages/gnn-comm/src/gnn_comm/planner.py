"""Choose and run a planner: ``plan(partition, topology)``.

``"auto"`` estimates straight messages, a ring and trees, and returns the cheapest; straight messages where nothing
beats them. On several hosts with more than 16 devices trees are planned in two levels.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from core_kernels.topology import Topology
from gnn_comm.cost_model import estimate_transfers, latency_of_pairs, row_bytes_of
from gnn_comm.errors import GnnCommArgumentError
from gnn_comm.partitioning import Partition, _check_topology
from gnn_comm.plan import Plan
from gnn_comm.planners.baselines import plan_p2p, plan_ring, plan_swap
from gnn_comm.planners.chunks import Chunks, ragged_arange, split_classes
from gnn_comm.planners.forest import TreeProblem
from gnn_comm.planners.hierarchical import plan_by_hosts
from gnn_comm.planners.replication import replicated_rows
from gnn_comm.planners.spst import grow_forest
from gnn_comm.transfers import Transfers, transfers_of_chunks

__all__ = ["PLANNERS", "plan", "stage_latency_seconds"]

PLANNERS = ("auto", "spst", "hierarchical", "p2p", "ring", "swap", "replication")
_MAX_FLAT_DEVICES = 16
_MAX_RING_DEVICES = 16
_NUM_CHUNKS = 1500
_MIN_GAIN = 0.98
"""Another planner replaces straight messages only if its estimate is below this share of theirs."""


def plan(
    partition: Partition,
    topology: Topology,
    planner: str = "auto",
    width: int = 256,
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    num_layers: int = 2,
    num_stages: int | None = None,
) -> Plan:
    """Plan the exchange of embeddings for a partitioned graph.

    Args:
        partition: The graph and who owns it.
        topology: The machine; part ``p`` is on device ``p``.
        planner: ``"auto"``, ``"spst"`` (trees), ``"hierarchical"`` (trees between hosts, then inside), ``"p2p"``,
            ``"ring"``, ``"swap"`` (through host memory) or ``"replication"`` (copies of the neighbourhood, no traffic).
        width: Values per row for which latency is weighed; the plan serves any width.
        dtype: Type of the values.
        seed: Of the random orders in planning.
        num_layers: Layers of the model; only ``"replication"`` needs it.
        num_stages: Stages of a tree plan; chosen by cost when left out.

    Returns:
        The plan, with the partition attached.

    Raises:
        GnnCommArgumentError: The planner is unknown, or a number is below 1.
        PlanMismatchError: Parts and devices differ in number.
        UnreachablePairError: A pair that must talk has no route.

    >>> from core_kernels import Graph
    >>> from gnn_comm.partitioning import partition
    >>> ring = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    >>> hosts = Topology.preset("hosts2")
    >>> plan(partition(ring, hosts, method="given", parts=[0, 0, 1, 1]), hosts).stages
    [Stage(messages=((0, 1, 1), (1, 0, 1)))]
    """
    if planner not in PLANNERS:
        raise GnnCommArgumentError(f"planner={planner!r} is not known; expected one of {PLANNERS}; choose one")
    for name, value in (("width", width), ("num_stages", num_stages)):
        if value is not None and value < 1:
            raise GnnCommArgumentError(f"{name}={value} is not valid; expected at least 1; raise it")
    if seed < 0:
        raise GnnCommArgumentError(f"seed={seed} is not valid; expected at least 0; pass such as 0")
    _check_topology(partition, topology)
    start = time.perf_counter()
    row_bytes = row_bytes_of(width, dtype)
    resident: tuple[np.ndarray, ...] = ()
    considered: dict[str, float] = {}
    if planner == "replication":
        resident = replicated_rows(partition, num_layers)
        transfers = transfers_of_chunks(split_classes(partition.requests, 0), *(np.zeros(0, np.int64),) * 4)
    elif planner == "auto":
        planner, transfers, considered = _cheapest(partition, topology, row_bytes, seed)
    else:
        transfers = _run(planner, partition, topology, row_bytes, seed, num_stages)
    if not considered:
        considered = {planner: estimate_transfers(transfers, topology, row_bytes).seconds}
    need_indptr, need_rows = _needed_rows(partition)
    return Plan(
        planner=planner,
        topology=topology,
        offsets=partition.offsets,
        transfers=transfers,
        need_indptr=need_indptr,
        need_rows=need_rows,
        graph_fingerprint=partition.graph_fingerprint,
        partition_fingerprint=partition.fingerprint,
        row_bytes=row_bytes,
        resident_rows=resident,
        num_layers=num_layers if resident else 0,
        considered=considered,
        planning_seconds=time.perf_counter() - start,
        partition=partition,
    )


def stage_latency_seconds(topology: Topology) -> float:
    """Return the largest latency of any route: what one more stage may cost."""
    return float(latency_of_pairs(topology).max(initial=0.0))


def _run(
    planner: str, partition: Partition, topology: Topology, row_bytes: int, seed: int, num_stages: int | None = None
) -> Transfers:
    """Run one planner that sends messages."""
    if planner in ("p2p", "ring", "swap"):
        chunks = split_classes(partition.requests, 0)
        edges = {"p2p": plan_p2p, "ring": plan_ring, "swap": plan_swap}[planner](chunks, topology)
        return transfers_of_chunks(chunks, *edges)
    latency = stage_latency_seconds(topology)
    if planner == "hierarchical":
        return plan_by_hosts(partition.requests, topology, row_bytes, latency, seed)
    chunks = split_classes(partition.requests, _NUM_CHUNKS)
    problem = tree_problem(chunks, topology, row_bytes)
    return transfers_of_chunks(chunks, *grow_forest(problem, latency, seed, num_stages=num_stages).edges())


def tree_problem(chunks: Chunks, topology: Topology, row_bytes: int) -> TreeProblem:
    """State the routing of chunks from their owners, all present from the first stage."""
    release = np.zeros(len(chunks), np.int64)
    num_bytes = chunks.num_rows * float(row_bytes)
    return TreeProblem(topology, chunks.source, release, chunks.need_indptr, chunks.need, num_bytes)


def _cheapest(
    partition: Partition, topology: Topology, row_bytes: int, seed: int
) -> tuple[str, Transfers, dict[str, float]]:
    """Estimate every planner that could win; straight messages win ties."""
    several_hosts = len(topology.hosts) > 1
    is_large = topology.num_devices > _MAX_FLAT_DEVICES and several_hosts
    names = ["hierarchical" if is_large else "spst", "p2p"]
    if topology.num_devices <= _MAX_RING_DEVICES:
        names.append("ring")
    found: dict[str, Transfers] = {}
    considered: dict[str, float] = {}
    failures = []
    for name in names:
        try:
            found[name] = _run(name, partition, topology, row_bytes, seed)
        except ValueError as error:  # no route: another planner may relay
            failures.append(error)
            continue
        considered[name] = estimate_transfers(found[name], topology, row_bytes).seconds
    if not found:
        raise failures[0]
    best = min(considered, key=lambda name: considered[name])
    if "p2p" in considered and considered[best] >= _MIN_GAIN * considered["p2p"]:
        best = "p2p"
    return best, found[best], considered


def _needed_rows(partition: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Return, per device, the remote rows it needs, ascending (CSR)."""
    requests = partition.requests
    num_needs = np.diff(requests.need_indptr)
    class_of_need = np.repeat(np.arange(requests.num_classes), num_needs)
    sizes = requests.num_rows[class_of_need]
    device = np.repeat(requests.need, sizes)
    rows = requests.rows[np.repeat(requests.row_indptr[class_of_need], sizes) + ragged_arange(sizes)]
    order = np.lexsort((rows, device))
    counts = np.bincount(device, minlength=partition.num_parts)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), rows[order]
