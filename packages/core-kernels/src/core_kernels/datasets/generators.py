"""Random graphs with the traits that matter here: heavy-tailed degrees (``rmat``) and classes to be learned (``sbm``).

Both are functions of their seed alone, the same on every machine, and cost a small constant per edge.

Sources: D. Chakrabarti, Y. Zhan, C. Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SDM 2004; B. Karrer,
M. Newman, "Stochastic blockmodels and community structure in networks", Phys. Rev. E 83, 2011 (degree correction).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core_kernels import random
from core_kernels.datasets.data import GraphData, split_masks
from core_kernels.errors import argument_error
from core_kernels.graph import Graph
from core_kernels.graph.build import index_dtype

__all__ = ["rmat", "sbm"]

# Purposes of random numbers (the layer key), apart from each other under one seed.
_NAMES, _WEIGHTS, _ENDS, _SIDES, _LABELS, _MEANS, _NOISE = range(0x6E00, 0x6E07)


def rmat(
    num_nodes: int,
    num_edges: int,
    probabilities: tuple[float, float, float, float] = (0.57, 0.19, 0.19, 0.05),
    num_features: int = 0,
    num_classes: int = 0,
    seed: int = 0,
) -> GraphData:
    """Generate a graph with heavy-tailed degrees; duplicates and self-loops are kept.

    Args:
        num_nodes: Number of nodes, at least 1.
        num_edges: Number of directed edges.
        probabilities: Of the quadrants (upper left, upper right, lower left, lower right) at every level of recursion;
            rounded to 2**-16.
        num_features: Width of features drawn from a normal distribution; 0 for none.
        num_classes: Number of classes of labels drawn evenly, with a 60/20/20 split; 0 for none.
        seed: Seed.

    Returns:
        The data.

    Raises:
        ArgumentError: A count is negative, or the probabilities are negative or do not sum to 1.

    >>> rmat(1000, 5000, num_features=4, num_classes=3)
    GraphData('rmat', num_nodes=1000, num_edges=5000, num_features=4, num_classes=3)
    """
    _check_counts(num_nodes=num_nodes, num_edges=num_edges, num_features=num_features, num_classes=num_classes)
    if len(probabilities) != 4 or min(probabilities) < 0 or not math.isclose(sum(probabilities), 1, abs_tol=1e-6):
        raise argument_error("probabilities", probabilities, "four shares of at least 0 that sum to 1", "scale them")

    from core_kernels.kernels.numba.generate import rmat_edges

    a, b, c, _ = probabilities
    first, second, third = (round(share * (1 << 16)) for share in (a, a + b, a + b + c))
    names = random.permutation(num_nodes, seed, layer=_NAMES).to(index_dtype(num_nodes))
    edge_index = torch.empty(2, num_edges, dtype=names.dtype)
    scale = max(num_nodes - 1, 0).bit_length()
    rmat_edges(seed, scale, first, second, third, names.numpy(), edge_index[0].numpy(), edge_index[1].numpy())
    graph = Graph.from_edge_index(edge_index, num_nodes)
    features = _normal(num_nodes, num_features, seed, _NOISE) if num_features else None
    if not num_classes:
        return GraphData(graph, features, name="rmat")
    labels = random.bounded(random.random_bits(seed, 0, _LABELS, torch.arange(num_nodes), 0), num_classes)
    return GraphData(graph, features, labels, *split_masks(labels, seed), name="rmat", num_classes=num_classes)


def sbm(
    num_nodes: int,
    num_classes: int,
    average_degree: float = 10.0,
    homophily: float = 0.8,
    degree_exponent: float | None = 2.5,
    num_features: int = 16,
    feature_signal: float = 0.5,
    seed: int = 0,
) -> GraphData:
    """Generate a stochastic block model with planted classes and corrected degrees.

    Args:
        num_nodes: Number of nodes, at least ``num_classes``.
        num_classes: Number of equal classes, at least 1.
        average_degree: In-degree before duplicates and self-loops are removed.
        homophily: Share of edges drawn inside a class; the others join any two nodes.
        degree_exponent: Nodes attract edges by a weight that follows a Pareto law of this density exponent, above 1;
            ``None`` for equal weights.
        num_features: Width of the features: the mean of the class plus standard normal noise; 0 for none.
        feature_signal: Standard deviation of the means.
        seed: Seed.

    Returns:
        A symmetric graph without duplicates, labels, and a 60/20/20 split.

    Raises:
        ArgumentError: A count or a share is out of its range.

    >>> data = sbm(500, num_classes=4, average_degree=8)
    >>> data.graph.num_nodes, data.num_classes
    (500, 4)
    """
    _check_counts(num_nodes=num_nodes, num_features=num_features)
    if not 1 <= num_classes <= num_nodes:
        raise argument_error("num_classes", num_classes, f"1 to num_nodes={num_nodes}", "choose fewer classes")
    if not 0 <= homophily <= 1:
        raise argument_error("homophily", homophily, "a share in [0, 1]", "pass 1.0 for edges inside classes only")
    if not average_degree >= 0:
        raise argument_error("average_degree", average_degree, "at least 0", "pass the wanted mean in-degree")
    if degree_exponent is not None and not degree_exponent > 1:
        raise argument_error("degree_exponent", degree_exponent, "a number above 1, or None", "pass 2.5")

    # Nodes are laid out by class along a line of weights; names[i] is the node at place i.
    place = torch.arange(num_nodes)
    names = random.permutation(num_nodes, seed, layer=_NAMES)
    class_of_place = place * num_classes // num_nodes
    weights = torch.ones(num_nodes, dtype=torch.float64)
    if degree_exponent is not None:
        uniform = random.uniform(random.random_bits(seed, 0, _WEIGHTS, place, 0))
        # Density ~ w**-exponent above 1; the cap keeps one node from taking more edges than there are nodes.
        weights = (1 - uniform).pow(-1 / (degree_exponent - 1)).clamp(max=math.sqrt(num_nodes))
    ends = torch.cumsum(weights, 0)
    class_bounds = torch.searchsorted(class_of_place, torch.arange(num_classes + 1))
    line_bounds = torch.cat([ends.new_zeros(1), ends])[class_bounds]

    edges = torch.arange(round(num_nodes * average_degree / 2))
    draws = random.uniform(random.random_bits(seed, 0, _ENDS, edges[:, None], torch.arange(2)))
    inside = random.uniform(random.random_bits(seed, 0, _SIDES, edges, 0)) < homophily
    sources = _find_place(ends, draws[:, 0] * ends[-1])
    home = class_of_place[sources]
    low = torch.where(inside, line_bounds[home], 0.0)
    high = torch.where(inside, line_bounds[home + 1], ends[-1])
    destinations = _find_place(ends, low + draws[:, 1] * (high - low))
    joined = sources != destinations
    graph = Graph.from_edge_index((names[sources[joined]], names[destinations[joined]]), num_nodes).symmetrized()

    labels = torch.empty_like(class_of_place)
    labels[names] = class_of_place
    features = None
    if num_features:
        means = _normal(num_classes, num_features, seed, _MEANS) * feature_signal
        features = means[labels] + _normal(num_nodes, num_features, seed, _NOISE)
    return GraphData(graph, features, labels, *split_masks(labels, seed), name="sbm", num_classes=num_classes)


def _find_place(ends: Tensor, points: Tensor) -> Tensor:
    """Return the place on the line that holds each point; rounding may put a point past the end."""
    return torch.searchsorted(ends, points, right=True).clamp(max=ends.shape[0] - 1)


def _normal(num_rows: int, num_columns: int, seed: int, layer: int) -> Tensor:
    """Return standard normal float32 numbers, by the transform of Box and Muller."""
    rows, columns = torch.arange(num_rows)[:, None], torch.arange(num_columns)
    radius = random.uniform(random.random_bits(seed, 0, layer, rows, columns))
    angle = random.uniform(random.random_bits(seed, 1, layer, rows, columns))
    return ((-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)).float()


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        least = 1 if name == "num_nodes" else 0
        if not isinstance(count, int) or count < least:
            raise argument_error(name, count, f"an integer of at least {least}", f"pass a larger {name}")
