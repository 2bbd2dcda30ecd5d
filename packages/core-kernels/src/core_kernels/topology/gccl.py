"""Read the device-graph JSON of GCCL, the library released by DGCL's authors.

The file holds ``n_devs``, ``n_virtual_devs`` and undirected ``edges`` with parallel lists ``src``, ``dst``, ``type``
and an optional ``contention_factor``, by which an edge is slower than its type; ``unconn_edges`` lists pairs of
devices that must not talk. Types carry no bandwidth there, so the nominal rate of each technology is used.

We differ in that a blocked pair is cut by leaving out its direct edge; a pair that shares switches stays connected.
"""

from __future__ import annotations

from typing import Any

from core_kernels.topology.model import Link, Node, Topology, TopologyError
from core_kernels.topology.presets import LATENCY_SECONDS, NOMINAL_GB_PER_SECOND

__all__ = ["from_gccl"]

_KIND = {"NV2": "NV2", "NV1": "NV1", "PCIE": "PCIE", "QPI": "QPI", "IB_NET": "IB", "IB": "IB"}


def from_gccl(fields: dict[str, Any], name: str = "gccl") -> Topology:
    """Build a topology from a parsed GCCL device graph.

    Args:
        fields: The parsed JSON.
        name: Name of the topology.

    Raises:
        TopologyError: A list is missing, lengths differ, or a type is unknown.

    >>> pair = {"n_devs": 2, "n_virtual_devs": 0, "edges": {"src": [0], "dst": [1], "type": ["NV2"]}}
    >>> from_gccl(pair).bytes_per_second(1, 0)
    48000000000.0
    """
    try:
        num_devices = int(fields["n_devs"])
        num_nodes = num_devices + int(fields.get("n_virtual_devs", 0))
        sources, targets, types = (list(fields["edges"][key]) for key in ("src", "dst", "type"))
    except (KeyError, TypeError) as error:
        raise TopologyError(
            f"the GCCL device graph lacks {error}; expected n_devs and edges.src, .dst, .type"
        ) from error
    factors = list(fields["edges"].get("contention_factor") or [1.0] * len(types))
    if not len(sources) == len(targets) == len(types) == len(factors):
        raise TopologyError(
            f"the edge lists have lengths {len(sources)}, {len(targets)}, {len(types)}, {len(factors)}; "
            "expected equal lengths; repair the file"
        )
    blocked = {frozenset(pair) for pair in fields.get("unconn_edges", [])}
    nodes = [Node(f"GPU{k}", "device") for k in range(num_devices)]
    nodes += [Node(f"virtual{k}", "switch") for k in range(num_nodes - num_devices)]
    links = []
    for a, b, kind, factor in zip(sources, targets, types, factors, strict=True):
        if kind == "UNCONNECT" or frozenset((a, b)) in blocked:
            continue
        if kind not in _KIND:
            raise TopologyError(f"edge {a}-{b} has type {kind!r}; expected one of {sorted(_KIND)}; rename it")
        rate = NOMINAL_GB_PER_SECOND[_KIND[kind]] * 1e9 / float(factor)
        latency = LATENCY_SECONDS[_KIND[kind]]
        links += [Link(a, b, _KIND[kind], rate, latency), Link(b, a, _KIND[kind], rate, latency)]
    return Topology(name, tuple(nodes), tuple(links), source="GCCL device graph, nominal rates")
