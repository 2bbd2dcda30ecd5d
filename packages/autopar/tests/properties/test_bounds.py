"""What the exact search leaves out before and on the way: dominated choices, and what known plans beat."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar import Problem, track
from autopar.tracking.dominance import undominated_choices

tracking = importlib.import_module("autopar.tracking.track")
elimination = importlib.import_module("autopar.tracking.elimination")


def entangled_problem(seed: int) -> Problem:
    """Draw 8 nodes of 3 choices on a ring with two chords, some pairs forbidden; 6,561 assignments."""
    rng = np.random.default_rng(seed)
    pairs = [*((i, (i + 1) % 8) for i in range(8)), (0, 4), (2, 6)]

    def costs(*shape):
        drawn = rng.integers(0, 1000, (*shape, 2)).astype(float)
        drawn[rng.random(shape) < 0.05] = np.inf
        return drawn

    return Problem([costs(3) for _ in range(8)], [(u, v, costs(3, 3)) for u, v in pairs])


def enumerate_frontier(problem: Problem) -> list[tuple[float, float]]:
    """Add up all assignments at once."""
    choices = np.array(list(itertools.product(range(3), repeat=problem.num_nodes)))
    total = sum(costs[choices[:, node]] for node, costs in enumerate(problem.node_costs))
    total = total + sum(costs[choices[:, u], choices[:, v]] for u, v, costs in problem.edge_costs)
    total = total[np.isfinite(total).all(-1)]
    frontier: list[tuple[float, float]] = []
    for memory, seconds in total[np.lexsort((total[:, 1], total[:, 0]))].tolist():
        if not frontier or seconds < frontier[-1][1]:
            frontier.append((memory, seconds))
    return frontier


@pytest.fixture
def always_bounded(monkeypatch):
    """Let every exact search take the way over coarser ones and their bounds."""
    monkeypatch.setattr(tracking, "_LONG_TABLE", 0)


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_bounded_search_equals_enumeration(always_bounded, start):
    for seed in range(start, start + 10):
        problem = entangled_problem(seed)
        frontier = track(problem)
        assert frontier.exact
        assert [(p.memory, p.seconds) for p in frontier.points] == enumerate_frontier(problem), seed
        for point in frontier.points:
            assert problem.cost(point.choices) == (point.memory, point.seconds)


def test_bounds_that_promise_too_much_lose_points(always_bounded, monkeypatch):
    """The twin: a corner that is taken for nearer than it is."""
    honest = tracking.find_bounds

    def too_tight(*args):
        bounds = honest(*args)
        return replace(bounds, limits=bounds.limits * 0.2, marginals={})  # choices stay, points go

    monkeypatch.setattr(tracking, "find_bounds", too_tight)
    lost = 0
    for seed in range(5):
        problem = entangled_problem(seed)
        found = {(p.memory, p.seconds) for p in track(problem).points}
        lost += found != set(enumerate_frontier(problem))
    assert lost


def test_an_impossible_problem_stays_empty(always_bounded):
    forbidden = np.full((2, 2, 2), np.inf)
    assert len(track(Problem([[(1, 2), (2, 1)]] * 2, [(0, 1, forbidden)]))) == 0


def test_a_choice_needed_by_one_neighbour_stays():
    nodes = [np.array([[1, 1], [2, 2]]), np.array([[0, 0], [0, 0]])]
    free = np.zeros((2, 2, 2), np.int64)
    assert [len(kept) for kept in undominated_choices(nodes, [(0, 1, free)])] == [1, 1]
    pays = free.copy()
    pays[0, 1] = (5, 5)  # with the neighbour's second choice the cheaper one costs more
    nodes[1] = np.array([[0, 3], [3, 0]])
    assert [len(kept) for kept in undominated_choices(nodes, [(0, 1, pays)])] == [2, 2]
    barred = free.copy()
    barred[0, 1] = -1
    assert [len(kept) for kept in undominated_choices(nodes, [(0, 1, barred)])] == [2, 2]


def repeated_layers(seed: int, num_layers: int = 6) -> Problem:
    """Draw one layer of a wide and a narrow node and repeat it; its ends differ from the middle."""
    rng = np.random.default_rng(seed)
    wide, narrow = rng.integers(1, 60, (6, 2)), rng.integers(1, 60, (2, 2))
    forth, back = rng.integers(0, 40, (6, 2, 2)), rng.integers(0, 40, (2, 6, 2))
    edges = []
    for layer in range(num_layers):
        edges += [(2 * layer, 2 * layer + 1, forth), (2 * layer + 1, 2 * layer + 2, back)]
    return Problem([wide if node % 2 == 0 else narrow for node in range(2 * num_layers + 1)], edges)


@pytest.fixture
def always_narrowed(monkeypatch):
    """Let every elimination look for nodes like its own."""
    monkeypatch.setattr(elimination, "_WORTH_NARROWING", 0)
    asked = []
    honest = elimination.Products.narrow
    monkeypatch.setattr(elimination.Products, "narrow", lambda *args: asked.append(args) or honest(*args))
    return asked


def halved(problem: Problem) -> list[tuple[float, float]]:
    """Search by halving, exactly: the error allowed is far below one unit."""
    return [(point.memory, point.seconds) for point in track(problem, eps=1e-9).points]


def test_choices_dropped_from_equal_layers_lose_nothing(always_narrowed):
    for seed in range(20):
        problem = repeated_layers(seed)
        assert halved(problem) == [(point.memory, point.seconds) for point in track(problem).points]
    assert any(len(choices) < 6 for *_, choices in always_narrowed)


def test_dropping_a_choice_that_is_used_loses_points(always_narrowed, monkeypatch):
    """The twin: one choice too many goes."""
    honest = elimination.Products.narrow
    monkeypatch.setattr(
        elimination.Products, "narrow", lambda self, table, node, choices: honest(self, table, node, choices[1:])
    )
    lost = 0
    for seed in range(10):
        problem = repeated_layers(seed)
        lost += halved(problem) != [(point.memory, point.seconds) for point in track(problem).points]
    assert lost


def test_a_sieve_that_shrinks_its_boxes_loses_points(monkeypatch):
    """The twin of the sieve, whose result is compared with enumeration elsewhere."""
    tables = importlib.import_module("autopar.tracking.tables")
    problem = repeated_layers(3, 20)
    whole = [(point.memory, point.seconds) for point in track(problem).points]
    honest = tables.supports

    def too_high(*args):
        least, points = honest(*args)
        return least * 1.05, points

    monkeypatch.setattr(tables, "_MANY_RUNS", 0)
    assert whole == [(point.memory, point.seconds) for point in track(problem).points]
    monkeypatch.setattr(tables, "supports", too_high)
    assert whole != [(point.memory, point.seconds) for point in track(problem).points]
