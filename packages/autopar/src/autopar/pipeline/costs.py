"""What stages cost: the units of a step searched on every sub-mesh and for every number of micro-batches, once each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.cost_model import local_bytes
from autopar.graph import Graph
from autopar.pipeline.chain import Chain
from autopar.pipeline.hosts import Placement, SubMesh, stage_cluster
from autopar.pipeline.microbatches import MicroBatches, cut_batch
from autopar.pipeline.stage_space import UnitFrontier, boundaries, per_micro_batch, search_unit
from autopar.pipeline.units import Unit, unit_graph, unit_signature
from autopar.placement import Layout

__all__ = ["StageCosts", "flights_counted"]

Variant = tuple[tuple[int, ...], Layout]


class StageCosts:
    """Costs of all stages of one step on one cluster, found when asked for.

    Args:
        graph: The captured step.
        cluster: The devices.
        units: Where it may be cut.
        eps: Thinning of every frontier.
    """

    def __init__(self, graph: Graph, cluster: Cluster, units: Sequence[Unit], eps: float):
        self.graph, self.cluster, self.units, self.eps = graph, cluster, list(units), eps
        self._chains: dict[tuple[SubMesh, int], Chain] = {}
        self._details: dict[int, tuple[list[Variant], list[list[UnitFrontier | None]]]] = {}
        self._batches: dict[int, tuple[MicroBatches, list[Graph], list[int]]] = {}
        self.users = _users_of_parameters(graph, units)
        self._shared = {graph.operators[p].target for p, readers in self.users.items() if len(readers) > 1}

    def parts(self, count: int) -> list[Graph]:
        """Return every unit as a graph at the shapes of one of ``count`` micro-batches."""
        return self._cut_batch(count)[1]

    def _cut_batch(self, count: int) -> tuple[MicroBatches, list[Graph], list[int]]:
        if count not in self._batches:
            batches = cut_batch(self.graph, count)
            parts = [unit_graph(self.graph, unit, batches)[0] for unit in self.units]
            known: dict[Any, int] = {}
            keys = [(unit_signature(part), *self._shared_of(part)) for part in parts]
            classes = [known.setdefault(key, len(known)) for key in keys]
            self._batches[count] = batches, parts, classes
        return self._batches[count]

    def _shared_of(self, part: Graph) -> list[int]:
        """Return which operators of a unit are parameters that other units read as well."""
        return [place for place, operator in enumerate(part.operators) if operator.target in self._shared]

    def chain(self, sub_mesh: SubMesh, count: int, most_stages: int) -> Chain:
        """Return the units on a sub-mesh.

        Args:
            sub_mesh: The devices of a stage.
            count: Micro-batches of a step.
            most_stages: Stages there may be, for the numbers of micro-batches in flight that are searched for.
        """
        key = sub_mesh, count
        if key not in self._chains:
            _, parts, classes = self._cut_batch(count)
            variants, rows = self._search_units(sub_mesh, count, most_stages)
            chain = Chain(
                [[unit.points if unit else None for unit in row] for row in rows],
                [[unit.working if unit else 0.0 for unit in row] for row in rows],
                [_boundary_bytes(parts, mesh, layout) for mesh, layout in variants],
                count,
                self.eps,
                classes,
            )
            self._chains[key] = chain
            self._details[id(chain)] = variants, rows
        return self._chains[key]

    def details(self, chain: Chain) -> tuple[list[Variant], list[list[UnitFrontier | None]]]:
        """Return the variants of a chain, and per variant the frontier of every unit."""
        return self._details[id(chain)]

    def _search_units(
        self, sub_mesh: SubMesh, count: int, most_stages: int
    ) -> tuple[list[Variant], list[list[UnitFrontier | None]]]:
        _, parts, classes = self._cut_batch(count)
        cluster = per_micro_batch(stage_cluster(self.cluster, sub_mesh), count)
        flights = sorted({flights_counted(stages, count) for stages in range(1, most_stages + 1)} | {count})
        if len(flights) > 4:
            flights = [1, flights[-1]]
        variants: list[Variant] = []
        rows: list[list[UnitFrontier | None]] = []
        for mesh in _meshes(sub_mesh):
            layouts = boundaries(len(mesh)) if mesh != (1,) else [(-1,)]
            known: dict[int, list[UnitFrontier | None]] = {}
            for part, number, unit in zip(parts, classes, self.units, strict=True):
                if number not in known:
                    has_source = unit.source is not None
                    known[number] = search_unit(
                        part, mesh, layouts, cluster, count, flights, has_source, self.eps, self._shared
                    )
            variants += [(mesh, layout) for layout in layouts]
            rows += [[known[number][place] for number in classes] for place in range(len(layouts))]
        return variants, rows

    def send_seconds(self, placement: Placement, count: int) -> np.ndarray:
        """Return float64 [sizes, units + 1, 2]: one direction before each unit, inside a host and between hosts.

        Every device of a stage sends its part; between hosts, the parts of a host share its link.
        """
        interconnect, parts = self.cluster.interconnect, self.parts(count)
        seconds = np.zeros((len(placement.sizes), len(self.units) + 1, 2))
        for row, size in enumerate(placement.sizes):
            hosts = max((s.num_hosts for s in placement.sub_meshes if s.num_devices == size), default=1)
            for unit in range(1, len(self.units)):
                num_bytes = parts[unit].operators[0].output.num_bytes
                inside = between = interconnect.seconds("send_recv", num_bytes / size, "1x2")
                if "network" in interconnect.links:
                    between = interconnect.seconds("send_recv", num_bytes / hosts, "2x1")
                seconds[row, unit] = inside, between
        return seconds

    def tied_seconds(self, placement: Placement) -> float:
        """Return the seconds in which stages add the gradients of parameters they share, were all of them far apart."""
        interconnect = self.cluster.interconnect
        shape = "2x1" if placement.crosses.any() and "network" in interconnect.links else "1x2"
        tied = [position for position, users in self.users.items() if len(users) > 1]
        sizes = [self.graph.operators[position].output.num_bytes for position in tied]
        return sum(interconnect.seconds("all_reduce", size, shape) for size in sizes)


def flights_counted(stages: int, count: int) -> int:
    """Return the micro-batches in flight counted for a stage: exact up to 4, then rounded up to a power of two.

    >>> [flights_counted(stages, 64) for stages in (1, 3, 5, 9, 100)]
    [1, 3, 8, 16, 64]
    """
    return min(count, stages if stages <= 4 else 1 << (stages - 1).bit_length())


def _boundary_bytes(parts: list[Graph], mesh: tuple[int, ...], layout: Layout) -> list[float]:
    """Return what one device holds of the value before each unit and after the last."""
    inner = [part.operators[0].output for part in parts[1:]]
    return [0.0, *(float(local_bytes(info, layout, mesh)) if _fits(info.shape, layout) else 0.0 for info in inner), 0.0]


def _fits(shape: tuple[int, ...], layout: Layout) -> bool:
    return max(layout) < len(shape)


def _meshes(sub_mesh: SubMesh) -> list[tuple[int, ...]]:
    """Return the meshes a stage may use: one axis, and hosts by devices, or two by half the devices."""
    size, hosts = sub_mesh.num_devices, sub_mesh.num_hosts
    outer = hosts if 1 < hosts < size else 2
    two_axes = size >= 4 and size % outer == 0 and size // outer > 1
    return [(size,), (outer, size // outer)] if two_axes else [(size,)]


def _users_of_parameters(graph: Graph, units: Sequence[Unit]) -> dict[int, list[int]]:
    """Return the units that read each parameter."""
    users: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for position in unit.operators:
            for source in graph.operators[position].inputs:
                if graph.operators[source].kind == "parameter" and number not in users.setdefault(source, []):
                    users[source].append(number)
    return users
