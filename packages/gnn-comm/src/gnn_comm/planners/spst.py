"""Shortest-path Steiner trees over chunks of rows: the planner of this package.

Three steps. (1) Grow a fan-out tree for every chunk under prices that fold all stages into one, and regrow the trees
a few times as the prices settle: this finds which way rows should go if stages overlapped perfectly. (2) Start the
trees in waves, so that while one wave crosses the slow links the one before fans out behind them. (3) Regrow the
trees stage by stage, keeping each old tree unless the new one is better.

More stages overlap better, but each costs a latency. The number of stages is chosen by that trade for the given bytes.

Symbols: F folded seconds, d depth of the trees, K stages, a seconds of latency per stage; a plan of K stages costs
about ``F (1 + (d - 1) / (2 K)) + K a``.

Source: DGCL (EuroSys 2021), shortest path spanning tree. We differ in chunks instead of single rows, in waves, in
regrowing, and in latency.
"""

from __future__ import annotations

import numpy as np

from core_kernels.topology import UnreachablePairError
from gnn_comm.planners.forest import Forest, TreeProblem

__all__ = ["MAX_STAGES", "grow_forest", "spread_forest"]

MAX_STAGES = 16
_DEPTH = 3
_CANDIDATES = (2, 3, 4, 6, 8, 12, MAX_STAGES)
_MANY_CHUNKS, _VERY_MANY_CHUNKS = 6000, 30000
# Orders of the norm (as powers of two) for the passes of each step; many chunks already spread well with few passes.
_FOLDED_PASSES, _STAGE_PASSES = (3, 4, 4, 5, 5, 6), (4, 5, 5, 6, 6)
_FOLDED_PASSES_MANY, _STAGE_PASSES_MANY = (4, 5, 5, 6), (5, 6)
_FOLDED_PASSES_VERY_MANY = (4, 6)


def grow_forest(
    problem: TreeProblem,
    latency_seconds: float,
    seed: int = 0,
    relays: bool = True,
    num_stages: int | None = None,
    depth: int = _DEPTH,
) -> Forest:
    """Find one tree per chunk.

    Args:
        problem: What has to be routed.
        latency_seconds: Cost of one more stage.
        seed: Of the random orders; the same seed gives the same forest.
        relays: Whether devices that need nothing may relay.
        num_stages: Number of stages to use; chosen by cost when left out.
        depth: Stages a tree may take from its release, more where some device is farther.

    Returns:
        The forest with the least seconds over its stages, latency included; never worse than sending straight.

    Raises:
        UnreachablePairError: Some device cannot be reached through any relays.
    """
    if problem.num_chunks == 0:
        return Forest(problem, 1, is_folded=False)
    generator = np.random.default_rng(seed)
    many = problem.num_chunks > _MANY_CHUNKS
    folded = _grow_folded(problem, generator, relays, _FOLDED_PASSES_MANY if many else _FOLDED_PASSES, depth)
    least = folded.num_stages
    if num_stages is None and problem.release.any():
        # Roots wait for what comes in stage by stage: only the last arrivals need stages of their own.
        candidates = [folded.deepest_stage() + 1, folded.deepest_stage() + 2]
    elif num_stages is None:
        candidates = _choose_stages(folded.cost_seconds(), least, latency_seconds, 1 if many else 2)
    else:
        candidates = [max(num_stages, least)]
    star = Forest.star(problem)
    forests = [] if star is None else [star]
    for stages in candidates:
        forest = folded.spread(stages, generator)
        for log_power in _STAGE_PASSES_MANY if many else _STAGE_PASSES:
            forest.regrow(log_power, generator, relays)
        forests.append(forest)
    return min(forests, key=lambda forest: _seconds(forest, latency_seconds))


def spread_forest(problem: TreeProblem, latency_seconds: float, seed: int = 0) -> Forest:
    """Find trees whose stages are only the first part of longer ways, and start them in even waves.

    Here a tree that ends early is worth nothing by itself, but lets others begin: rows that have crossed between hosts
    fan out while the next wave crosses. So waves are kept even, and not regrown for these trees alone.
    """
    if problem.num_chunks == 0:
        return Forest(problem, 1, is_folded=False)
    generator = np.random.default_rng(seed)
    many, very_many = (problem.num_chunks > limit for limit in (_MANY_CHUNKS, _VERY_MANY_CHUNKS))
    passes = _FOLDED_PASSES_VERY_MANY if very_many else _FOLDED_PASSES_MANY if many else _FOLDED_PASSES
    folded = _grow_folded(problem, generator, True, passes)
    stages = _choose_stages(folded.cost_seconds(), folded.num_stages + _DEPTH - 1, latency_seconds, 1)[0]
    return folded.spread(stages, generator)


def _grow_folded(
    problem: TreeProblem, generator: np.random.Generator, relays: bool, passes: tuple[int, ...], depth: int = _DEPTH
) -> Forest:
    """Grow folded trees of the least depth that reaches every device."""
    release, num_devices = int(problem.release.max(initial=0)), problem.topology.num_devices
    depth = min(depth, max(num_devices - 1, 1))
    while True:
        forest = Forest(problem, release + depth, is_folded=True)
        try:
            for log_power in passes:
                forest.regrow(log_power, generator, relays)
            return forest
        except UnreachablePairError:
            if depth >= num_devices - 1:
                raise
            depth = min(2 * depth, num_devices - 1)


def _choose_stages(folded_seconds: float, depth: int, latency_seconds: float, num_choices: int) -> list[int]:
    """Order the numbers of stages by expected seconds and return the first few."""
    possible = [stages for stages in _CANDIDATES if stages >= depth] or [depth]
    expected = {k: folded_seconds * (1 + (depth - 1) / (2 * k)) + k * latency_seconds for k in possible}
    return sorted(possible, key=lambda k: expected[k])[:num_choices]


def _seconds(forest: Forest, latency_seconds: float) -> float:
    stages = len(np.unique(forest.edges()[1]))
    return forest.cost_seconds() + stages * latency_seconds
