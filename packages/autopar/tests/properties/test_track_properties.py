"""Frontier tracking against exhaustive enumeration, in integers and in floats."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import Problem, track


def random_problem(seed: int, whole: bool = True, forbidden: float = 0.0) -> Problem:
    """Draw up to 7 nodes of up to 4 choices, with branches, parallel edges and unconnected nodes."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 8))
    sizes = rng.integers(1, 5, num_nodes)

    def costs(*shape):
        drawn = rng.integers(0, 12, (*shape, 2)).astype(float) if whole else rng.random((*shape, 2))
        drawn[rng.random(shape) < forbidden] = np.inf
        return drawn

    pairs = list(itertools.combinations(range(num_nodes), 2))
    chosen = [pairs[i] for i in rng.integers(0, len(pairs), rng.integers(0, 2 * num_nodes))] if pairs else []
    edges = [(v, u) if rng.random() < 0.5 else (u, v) for u, v in chosen]
    return Problem([costs(k) for k in sizes], [(u, v, costs(sizes[u], sizes[v])) for u, v in edges])


def enumerate_frontier(problem: Problem) -> list[tuple[float, float]]:
    choices = itertools.product(*(range(problem.num_choices(n)) for n in range(problem.num_nodes)))
    costs = sorted(cost for cost in map(problem.cost, choices) if np.isfinite(cost).all())
    frontier: list[tuple[float, float]] = []
    for memory, seconds in costs:
        if not frontier or seconds < frontier[-1][1]:
            frontier.append((memory, seconds))
    return frontier


@pytest.mark.parametrize("start", range(0, 500, 50))
def test_equals_enumeration_on_500_graphs(start):
    for seed in range(start, start + 50):
        problem = random_problem(seed)
        frontier = track(problem)
        assert [(p.memory, p.seconds) for p in frontier.points] == enumerate_frontier(problem), seed
        for point in frontier.points:
            assert problem.cost(point.choices) == (point.memory, point.seconds)


def test_forbidden_choices_are_never_taken():
    empty = 0
    for seed in range(60):
        problem = random_problem(seed, forbidden=0.2)
        frontier = track(problem)
        assert [(p.memory, p.seconds) for p in frontier.points] == enumerate_frontier(problem), seed
        empty += len(frontier) == 0
    assert 0 < empty < 60


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_equals_enumeration_in_floats(seed):
    problem = random_problem(seed, whole=False)
    found = np.array([(p.memory, p.seconds) for p in track(problem).points])
    expected = np.array(enumerate_frontier(problem))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.5))
def test_thinning_keeps_its_guarantee(seed, eps):
    problem = random_problem(seed)
    thinned = track(problem, eps=eps)
    for memory, seconds in enumerate_frontier(problem):
        assert any(
            m <= (1 + eps) * memory + 1e-9 and s <= seconds
            for m, s in zip(thinned.memory, thinned.seconds, strict=True)
        )
    assert thinned.memory[0] == track(problem).memory[0]


def test_conditioning_is_exact_until_combinations_run_out():
    heuristic = 0
    for seed in range(40):
        problem = random_problem(seed)
        exact = track(problem)
        conditioned = track(problem, max_cells=4)
        assert conditioned.exact
        np.testing.assert_array_equal(conditioned.memory, exact.memory)
        np.testing.assert_array_equal(conditioned.seconds, exact.seconds)
        settled = track(problem, max_cells=4, max_conditions=1)
        heuristic += not settled.exact
        for point in settled.points:
            assert problem.cost(point.choices) == (point.memory, point.seconds)
    assert heuristic > 10


def test_a_search_that_prunes_by_time_alone_misses_points():
    """The twin: filtering memory only at the end loses plans that fit, so the comparison must see it."""
    missed = 0
    for seed in range(50):
        problem = random_problem(seed)
        fastest = min(enumerate_frontier(problem), key=lambda point: point[1])
        missed += [fastest] != enumerate_frontier(problem)
    assert missed > 25
