"""The routing problem of all chunks, and the trees found for it so far.

A :class:`Forest` holds one tree per chunk as (stage, sender, receiver) edges. It can be priced at full overlap (one
row of loads) or stage by stage, regrown, and delayed: shifting a whole tree by some stages keeps it valid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core_kernels.topology import Topology, UnreachablePairError
from gnn_comm.planners._trees import regrow_trees
from gnn_comm.planners.chunks import ragged_arange

__all__ = ["Forest", "TreeProblem"]


@dataclass(frozen=True)
class TreeProblem:
    """What has to be routed over which machine.

    Args:
        topology: The machine.
        root: int64 ``[num_chunks]``; device that holds each chunk.
        release: int64 ``[num_chunks]``; first stage in which the root may send.
        need_indptr: int64 ``[num_chunks + 1]``.
        need: int64; devices in need of each chunk.
        num_bytes: float64 ``[num_chunks]``.
        base_loads: float64 ``[num_stages, num_resources]`` in seconds; what other traffic adds to each stage.
    """

    topology: Topology
    root: np.ndarray
    release: np.ndarray
    need_indptr: np.ndarray
    need: np.ndarray
    num_bytes: np.ndarray
    base_loads: np.ndarray | None = None

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.root)


class Forest:
    """One tree per chunk.

    Args:
        problem: What is routed.
        num_stages: Stages the trees may use.
        is_folded: Count the loads of all stages in one row, the limit of full overlap.
    """

    def __init__(self, problem: TreeProblem, num_stages: int, is_folded: bool):
        self.problem, self.num_stages, self.is_folded = problem, num_stages, is_folded
        num_devices = problem.topology.num_devices
        self._start = np.arange(problem.num_chunks, dtype=np.int64) * max(num_devices - 1, 1)
        self._count = np.zeros(problem.num_chunks, np.int64)
        self._edges = np.zeros((problem.num_chunks * max(num_devices - 1, 1), 3), np.int16)
        seconds_per_byte = 1.0 / problem.topology.resource_bytes_per_second
        self._scale = max(float(problem.num_bytes.sum() * seconds_per_byte.min(initial=1.0)), 1e-300)
        self._seconds_per_byte = seconds_per_byte / self._scale
        self._loads = self._base()

    def _base(self) -> np.ndarray:
        shape = (1 if self.is_folded else self.num_stages, len(self._seconds_per_byte))
        base = self.problem.base_loads
        if base is None:
            return np.zeros(shape)
        if self.is_folded:
            return base.sum(axis=0, keepdims=True) / self._scale
        padded = np.zeros(shape)
        padded[: len(base)] = base[: self.num_stages] / self._scale
        return padded

    def cost_seconds(self) -> float:
        """Return the sum over rows of loads of the largest load."""
        return float(self._loads.max(axis=1, initial=0.0).sum()) * self._scale

    def regrow(self, log_power: int, generator: np.random.Generator, relays: bool = True) -> None:
        """Regrow every tree once, in random order.

        Args:
            log_power: Loads are smoothed to the norm of order ``2**log_power``.
            generator: Source of the order.
            relays: Whether devices that need nothing may relay.

        Raises:
            UnreachablePairError: Some device cannot be reached in this many stages.
        """
        problem, routes = self.problem, self.problem.topology.routes
        failed = regrow_trees(
            self.num_stages, routes.num_devices, routes.indptr, routes.items, routes.reachable, self._seconds_per_byte,
            problem.root, problem.release, problem.need_indptr, problem.need, problem.num_bytes,
            generator.permutation(problem.num_chunks), log_power, 1e-6 / max(problem.num_chunks, 1), relays,
            self._loads, self._edges, self._start, self._count,
        )  # fmt: skip
        if failed >= 0:
            self._raise_unreachable(int(failed))

    def _raise_unreachable(self, chunk: int) -> None:
        problem, names = self.problem, [node.name for node in self.problem.topology.nodes]
        needs = problem.need[problem.need_indptr[chunk] : problem.need_indptr[chunk + 1]]
        root = int(problem.root[chunk])
        direct = [int(v) for v in needs if not problem.topology.is_reachable(root, int(v))] or [int(needs[0])]
        raise UnreachablePairError(
            f"{names[root]} cannot reach {names[direct[0]]} in topology {problem.topology.name!r} within "
            f"{self.num_stages} stages, even through relays; expected a path of links; add the missing link"
        )

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return chunk, stage, sender and receiver of every tree edge, int64."""
        chunk = np.repeat(np.arange(self.problem.num_chunks), self._count)
        found = self._edges[np.repeat(self._start, self._count) + ragged_arange(self._count)].astype(np.int64)
        return chunk, found[:, 0], found[:, 1], found[:, 2]

    def deepest_stage(self) -> int:
        """Return the last stage in which a tree has an edge; 0 without edges."""
        return int(self.edges()[1].max(initial=0))

    def spread(self, num_stages: int, generator: np.random.Generator) -> Forest:
        """Start the trees of a folded forest in waves, so that the stages of a real plan carry about equal loads.

        Args:
            num_stages: Stages of the result, at least the depth of the deepest tree.
            generator: Decides which tree starts when.
        """
        result = Forest(self.problem, num_stages, is_folded=False)
        result._edges[:], result._count[:] = self._edges, self._count
        chunk, stage, sender, receiver = self.edges()
        last = np.zeros(self.problem.num_chunks, np.int64)
        np.maximum.at(last, chunk, stage)
        # What is left until the end is divided evenly, by bytes, among the waves of each root.
        slack = np.maximum(num_stages - 1 - last, 0)
        order = generator.permutation(self.problem.num_chunks)
        order = order[np.argsort(self.problem.root[order], kind="stable")]
        num_bytes = np.cumsum(self.problem.num_bytes[order])
        root = self.problem.root[order]
        first = np.searchsorted(root, root, side="left")
        total = (
            num_bytes[np.searchsorted(root, root, side="right") - 1]
            - (num_bytes - self.problem.num_bytes[order])[first]
        )
        so_far = num_bytes - self.problem.num_bytes[order] / 2 - (num_bytes - self.problem.num_bytes[order])[first]
        rank = np.zeros(self.problem.num_chunks)
        rank[order] = so_far / np.maximum(total, 1e-300)
        delay = np.minimum((rank * (slack + 1)).astype(np.int64), slack)
        position = np.repeat(self._start, self._count) + ragged_arange(self._count)
        result._edges[position, 0] = (stage + delay[chunk]).astype(np.int16)
        result._add_all(chunk, stage + delay[chunk], sender, receiver)
        return result

    def _add_all(self, chunk, stage, sender, receiver) -> None:
        routes = self.problem.topology.routes
        pair = sender * routes.num_devices + receiver
        lengths = routes.indptr[pair + 1] - routes.indptr[pair]
        items = routes.items[np.repeat(routes.indptr[pair], lengths) + ragged_arange(lengths)]
        num_bytes = np.repeat(self.problem.num_bytes[chunk], lengths)
        np.add.at(self._loads, (np.repeat(stage, lengths), items), num_bytes * self._seconds_per_byte[items])

    @classmethod
    def star(cls, problem: TreeProblem) -> Forest | None:
        """Send every chunk straight from its root in its first stage; ``None`` where some pair has no route."""
        num_needs = np.diff(problem.need_indptr)
        chunk = np.repeat(np.arange(problem.num_chunks), num_needs)
        routes = problem.topology.routes
        if not routes.reachable[problem.root[chunk] * routes.num_devices + problem.need].all():
            return None
        stage = problem.release[chunk]
        forest = cls(problem, int(stage.max(initial=0)) + 1, is_folded=False)
        forest._count[:] = num_needs
        position = forest._start[chunk] + ragged_arange(num_needs)
        forest._edges[position] = np.stack([stage, problem.root[chunk], problem.need], axis=1)
        forest._add_all(chunk, stage, problem.root[chunk], problem.need)
        return forest
