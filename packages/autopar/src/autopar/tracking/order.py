"""In which order nodes are eliminated: low width, and one growing frontier instead of two.

Eliminating a node joins its neighbours; the cost is exponential in the number of neighbours and proportional to the
product of the frontiers that meet. A good order keeps both small:

1. Minimum fill makes the graph chordal with few added edges: chains, residual branches, parallel projections collapse.
2. The chordal graph is swept from one end of its longest path to the other (maximum cardinality search, reversed). One
   long frontier then travels along the path and meets only the short ones of side branches; in TensorOpt's terms this
   is linear dynamic programming where the graph is a chain and node, edge and branch elimination elsewhere.
"""

from __future__ import annotations

import heapq
from collections import deque

__all__ = ["balanced_order", "elimination_order", "largest_scope", "subtree_sizes", "widest_node"]

Adjacency = list[set[int]]


def _fill(adjacency: Adjacency, node: int) -> int:
    """Count the edges that eliminating ``node`` would add."""
    around = adjacency[node]
    return sum(len(around - adjacency[other]) - 1 for other in around) // 2


def _triangulate(adjacency: Adjacency) -> Adjacency:
    """Return a chordal graph with the edges of ``adjacency`` and those that minimum-fill elimination adds."""
    chordal = [set(around) for around in adjacency]
    work = [set(around) for around in adjacency]
    queue = [(_fill(work, node), len(work[node]), node) for node in range(len(work))]
    newest = dict(enumerate(queue))
    heapq.heapify(queue)
    while newest:
        entry = heapq.heappop(queue)
        node = entry[2]
        if newest.get(node) != entry:
            continue
        del newest[node]
        around = work[node]
        for other in around:
            added = around - work[other] - {other}
            work[other] |= added
            chordal[other] |= added
            work[other].discard(node)
        touched = set(around).union(*(work[other] for other in around)) if around else set()
        for other in touched:
            if other in newest:
                newest[other] = (_fill(work, other), len(work[other]), other)
                heapq.heappush(queue, newest[other])
    return chordal


def _distances(adjacency: Adjacency, start: int) -> dict[int, int]:
    """Return the number of edges from ``start`` to every node it reaches, in the order of reaching them."""
    distance = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(adjacency[node]):
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance


def _sweep(chordal: Adjacency, start: int, to_end: dict[int, int], visited: dict[int, None]) -> None:
    """Visit a component by maximum cardinality search from ``start``.

    Among equals the node nearest the other end comes first. Reversed, the inner nodes of a side branch are then
    eliminated while their tables are small, and the long frontier passes the branch's two ends only.
    """
    weight = dict.fromkeys(to_end, 0)
    buckets: dict[int, set[int]] = {0: {start}}
    top = 0
    while top >= 0:
        if not buckets.get(top):
            top -= 1
            continue
        node = min(buckets[top], key=lambda n: (to_end[n], n))
        buckets[top].discard(node)
        visited[node] = None
        for other in chordal[node]:
            if other not in visited:
                buckets.get(weight[other], set()).discard(other)
                weight[other] += 1
                buckets.setdefault(weight[other], set()).add(other)
                top = max(top, weight[other])


def elimination_order(num_nodes: int, edges: list[tuple[int, int]]) -> list[int]:
    """Return the nodes in the order in which they are to be eliminated.

    >>> elimination_order(4, [(0, 1), (1, 2), (2, 3)])
    [3, 2, 1, 0]
    """
    adjacency: Adjacency = [set() for _ in range(num_nodes)]
    for u, v in edges:
        adjacency[u].add(v)
        adjacency[v].add(u)
    chordal = _triangulate(adjacency)
    visited: dict[int, None] = {}
    for node in range(num_nodes):
        if node not in visited:
            end = [*_distances(adjacency, node)][-1]
            to_end = _distances(adjacency, end)
            _sweep(chordal, [*to_end][-1], to_end, visited)
    return list(visited)[::-1]


def balanced_order(num_nodes: int, edges: list[tuple[int, int]]) -> list[int]:
    """Return an order that halves chains again and again instead of sweeping them.

    Nodes of at most two neighbours go first, those whose tables stem from the fewest eliminations before others. Equal
    blocks in a row are then combined pairwise, each pair alike, so that a search which remembers its products does
    the work of one pair per round; and no table stems from more than about the logarithm of the chain's length.
    """
    adjacency: Adjacency = [set() for _ in range(num_nodes)]
    for u, v in edges:
        adjacency[u].add(v)
        adjacency[v].add(u)
    level = [0] * num_nodes

    def priority(node: int) -> tuple[int, int, int]:
        return max(2, len(adjacency[node])), level[node], node

    queue = [priority(node) for node in range(num_nodes)]
    heapq.heapify(queue)
    order: list[int] = []
    done = [False] * num_nodes
    while queue:
        entry = heapq.heappop(queue)
        node = entry[2]
        if done[node] or entry != priority(node):
            continue
        done[node] = True
        order.append(node)
        around = adjacency[node]
        for other in around:
            adjacency[other] |= around
            adjacency[other] -= {node, other}
            level[other] = max(level[other], level[node] + 1)
            heapq.heappush(queue, priority(other))
    return order


def subtree_sizes(order: list[int], edges: list[tuple[int, int]], num_nodes: int) -> list[int]:
    """Return per node from how many eliminations its table stems, its own included; 0 for nodes not in the order.

    >>> subtree_sizes([0, 2, 1], [(0, 1), (1, 2)], 3)
    [1, 3, 1]
    """
    place = {node: position for position, node in enumerate(order)}
    around: Adjacency = [set() for _ in range(num_nodes)]
    for u, v in edges:
        first, second = sorted((u, v), key=place.__getitem__)
        around[first].add(second)
    sizes = [0] * num_nodes
    for node in order:
        sizes[node] += 1
        if around[node]:
            heir = min(around[node], key=place.__getitem__)
            around[heir] |= around[node] - {heir}
            sizes[heir] += sizes[node]
    return sizes


def largest_scope(order: list[int], edges: list[tuple[int, int]], sizes: list[int]) -> tuple[int, int]:
    """Return (cells, node): the most cells that one elimination of ``order`` combines, and where.

    Cells count the eliminated node's choices too.
    """
    place = {node: position for position, node in enumerate(order)}
    around: Adjacency = [set() for _ in sizes]
    for u, v in edges:
        first, second = sorted((u, v), key=place.__getitem__)
        around[first].add(second)
    worst = (0, -1)
    for node in order:
        cells = sizes[node]
        for other in around[node]:
            cells *= sizes[other]
        worst = max(worst, (cells, node))
        if around[node]:
            heir = min(around[node], key=place.__getitem__)
            around[heir] |= around[node] - {heir}
    return worst


def widest_node(edges: list[tuple[int, int]], sizes: list[int], fixed: set[int]) -> int:
    """Return the node with the most neighbours among those not fixed: the one whose removal simplifies most."""
    degree = [0] * len(sizes)
    for u, v in edges:
        if u not in fixed and v not in fixed:
            degree[u] += 1
            degree[v] += 1
    return max((n for n in range(len(sizes)) if n not in fixed), key=lambda n: (degree[n], -sizes[n], -n))
