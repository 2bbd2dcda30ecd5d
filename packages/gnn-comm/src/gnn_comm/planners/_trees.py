"""Grow and regrow fan-out trees over stages, under congestion prices (compiled).

A transfer of a chunk of rows from ``u`` to ``v`` in stage ``k`` adds its seconds to the load of every resource of
the route. The cost of a stage is the largest load; here it is smoothed to the p-norm of the loads, so that the price
of a transfer, the growth of that norm, also tells nearly full resources from idle ones. A row received in stage
``k`` may be sent on in any later stage: the cheapest way to each device is a shortest path in (device, stage), found
by one sweep over the stages. A tree grows by the cheapest way to any device still in need (shortest-path Steiner
tree); devices that need nothing may relay.

Loads are kept in rows; stage ``k`` counts in row ``k % num_rows``. One row per stage gives the real cost of a plan
with barriers between stages. A single row for all stages gives the cost of a plan so finely pipelined that its
stages overlap fully: its trees are the best to schedule, because they say how much each resource must carry in any
case.

Symbols: P devices, K stages, R resources, C chunks; ``loads[k, r]`` in seconds over a scale; ``p = 2**log_power``.

Source: DGCL (EuroSys 2021), SPST. We differ in planning chunks of interchangeable rows, in smoothed prices, in
letting a transfer wait for a later stage, and in regrowing every tree several times.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["regrow_trees"]


@njit(cache=True, nogil=True, inline="always")
def _power(value, log_power):
    for _ in range(log_power):
        value *= value
    return value


@njit(cache=True, nogil=True, inline="always")
def _root(value, log_power):
    for _ in range(log_power):
        value = np.sqrt(value)
    return value


@njit(cache=True, nogil=True)
def _price_transfers(loads, seconds, log_power, route_ptr, route_item, reachable, growth, price):
    """Fill ``price[k, u * P + v]`` with the growth of the norm of row ``k``; return the sum of norms as it stands."""
    num_rows, num_resources = loads.shape
    num_pairs = price.shape[1]
    total = 0.0
    for row in range(num_rows):
        norm_power = 0.0
        for r in range(num_resources):
            load = loads[row, r]
            power = _power(load, log_power)
            norm_power += power
            growth[r] = _power(load + seconds[r], log_power) - power
        norm = _root(norm_power, log_power)
        total += norm
        for pair in range(num_pairs):
            if reachable[pair]:
                grown = norm_power
                for k in range(route_ptr[pair], route_ptr[pair + 1]):
                    grown += growth[route_item[k]]
                price[row, pair] = _root(grown, log_power) - norm
    return total


@njit(cache=True, nogil=True)
def _sum_of_norms(loads, log_power):
    total = 0.0
    for stage in range(loads.shape[0]):
        norm_power = 0.0
        for r in range(loads.shape[1]):
            norm_power += _power(loads[stage, r], log_power)
        total += _root(norm_power, log_power)
    return total


@njit(cache=True, nogil=True)
def _add_edges(loads, seconds, sign, P, route_ptr, route_item, edges, start, count):
    for e in range(start, start + count):
        row, pair = edges[e, 0] % loads.shape[0], edges[e, 1] * P + edges[e, 2]
        for k in range(route_ptr[pair], route_ptr[pair + 1]):
            r = route_item[k]
            loads[row, r] = max(0.0, loads[row, r] + sign * seconds[r])


@njit(cache=True, nogil=True)
def _sweep(price, hop, reachable, ready, num_stages, P, relays, wanted, cost, before):
    """Find the cheapest way to every device outside the tree; ``before[k + 1, v]`` is the sender, or -1 for waiting."""
    for v in range(P):
        cost[0, v] = 0.0 if ready[v] == 0 else np.inf
        before[0, v] = -1
    num_rows = price.shape[0]
    for stage in range(num_stages):
        row = stage % num_rows
        for v in range(P):
            inside = ready[v] >= 0
            cost[stage + 1, v] = 0.0 if inside and ready[v] <= stage + 1 else (np.inf if inside else cost[stage, v])
            before[stage + 1, v] = -1
        for u in range(P):
            so_far = cost[stage, u]
            if so_far == np.inf or not (relays or ready[u] >= 0 or wanted[u]):
                continue
            for v in range(P):
                if ready[v] < 0 and u != v and reachable[u * P + v]:
                    reached = so_far + price[row, u * P + v] + hop
                    if reached < cost[stage + 1, v]:
                        cost[stage + 1, v] = reached
                        before[stage + 1, v] = u


@njit(cache=True, nogil=True)
def _grow_tree(
    price, hop, reachable, num_stages, P, relays, root, release, wanted, num_wanted, ready, cost, before, edges, start
):
    """Grow one tree into ``edges[start:]`` (stage, sender, receiver); return its size, or -1 if a device is cut off."""
    for v in range(P):
        ready[v] = -1
    ready[root] = release
    count = 0
    while num_wanted > 0:
        _sweep(price, hop, reachable, ready, num_stages, P, relays, wanted, cost, before)
        nearest, best = -1, np.inf
        for v in range(P):
            if wanted[v] and ready[v] < 0 and cost[num_stages, v] < best:
                nearest, best = v, cost[num_stages, v]
        if nearest < 0:
            return -1
        v, stage = nearest, num_stages
        while ready[v] < 0:
            while before[stage, v] < 0:
                stage -= 1
            u = before[stage, v]
            ready[v] = stage
            edges[start + count, 0], edges[start + count, 1], edges[start + count, 2] = stage - 1, u, v
            count += 1
            if wanted[v]:
                num_wanted -= 1
            v, stage = u, stage - 1
    return count


@njit(cache=True, nogil=True)
def regrow_trees(
    num_stages, P, route_ptr, route_item, reachable, seconds_per_byte, root, release, need_ptr, need, num_bytes,
    order, log_power, hop, relays, loads, edges, edge_start, edge_count,
):  # fmt: skip
    """Regrow the tree of every chunk in ``order``, keeping the old tree where the new one is no better.

    Args:
        num_stages: Number K of stages.
        P: Number of devices.
        route_ptr, route_item, reachable: Routes of all pairs (:class:`core_kernels.topology.routes.Routes`).
        seconds_per_byte: float64 ``[R]``, already divided by the scale of ``loads``.
        root, release: int64 ``[C]``; the device that holds the chunk and the first stage in which it may send.
        need_ptr, need: CSR of the devices in need of each chunk.
        num_bytes: float64 ``[C]``.
        order: Chunks to treat, in order.
        log_power: Smoothing; larger is closer to the true maximum.
        hop: Cost per transfer, so that shorter trees win among equals.
        relays: Whether devices that need nothing may relay.
        loads: float64 ``[K or 1, R]``, updated in place.
        edges: int16 ``[capacity, 3]`` of (stage, sender, receiver), updated in place.
        edge_start, edge_count: int64 ``[C]``; a count of 0 means no tree yet.

    Returns:
        The first chunk with a device that cannot be reached, or -1.
    """
    num_rows, num_resources = loads.shape
    price = np.full((num_rows, P * P), np.inf)
    growth, seconds = np.empty(num_resources), np.empty(num_resources)
    cost, before = np.empty((num_stages + 1, P)), np.empty((num_stages + 1, P), np.int64)
    ready, wanted = np.empty(P, np.int64), np.zeros(P, np.bool_)
    old = np.empty((P, 3), edges.dtype)
    for c in order:
        start, num_old = edge_start[c], edge_count[c]
        for r in range(num_resources):
            seconds[r] = num_bytes[c] * seconds_per_byte[r]
        for k in range(need_ptr[c], need_ptr[c + 1]):
            wanted[need[k]] = True
        norms_with_old = 0.0
        if num_old > 0:
            norms_with_old = _sum_of_norms(loads, log_power)
            old[:num_old] = edges[start : start + num_old]
            _add_edges(loads, seconds, -1.0, P, route_ptr, route_item, edges, start, num_old)
        _price_transfers(loads, seconds, log_power, route_ptr, route_item, reachable, growth, price)
        count = _grow_tree(
            price, hop, reachable, num_stages, P, relays, root[c], release[c], wanted, need_ptr[c + 1] - need_ptr[c],
            ready, cost, before, edges, start,
        )  # fmt: skip
        for k in range(need_ptr[c], need_ptr[c + 1]):
            wanted[need[k]] = False
        if count < 0:
            return c
        _add_edges(loads, seconds, 1.0, P, route_ptr, route_item, edges, start, count)
        if num_old > 0 and _sum_of_norms(loads, log_power) + hop * (count - num_old) > norms_with_old:
            _add_edges(loads, seconds, -1.0, P, route_ptr, route_item, edges, start, count)
            edges[start : start + num_old] = old[:num_old]
            count = num_old
            _add_edges(loads, seconds, 1.0, P, route_ptr, route_item, edges, start, count)
        edge_count[c] = count
    return -1
