"""Problems, frontiers and their errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar import Frontier, Problem, track
from autopar.errors import InfeasibleError, ProblemError
from autopar.tracking.order import elimination_order, largest_scope


def chain(num_nodes: int, num_choices: int, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    edges = {(i, i + 1): rng.integers(0, 100, (num_choices, num_choices, 2)) for i in range(num_nodes - 1)}
    return Problem([rng.integers(1, 1000, (num_choices, 2)) for _ in range(num_nodes)], edges)


@pytest.fixture
def frontier() -> Frontier:
    return track(chain(12, 4))


def test_frontier_is_strictly_monotone(frontier):
    assert len(frontier) > 10
    assert (np.diff(frontier.memory) > 0).all()
    assert (np.diff(frontier.seconds) < 0).all()


def test_choosing(frontier):
    assert frontier.mini_time() == frontier[-1]
    budget = float(frontier.memory[3]) + 0.5
    assert frontier.mini_time(memory=budget) == frontier[3]
    assert frontier.min_memory() == frontier[0]
    allowed = frontier.min_memory(slowdown=1.2)
    assert allowed.seconds <= 1.2 * frontier[-1].seconds
    assert frontier[frontier.points.index(allowed) - 1].seconds > 1.2 * frontier[-1].seconds
    best = frontier.max_memory_efficiency()
    assert best.memory * best.seconds == min(p.memory * p.seconds for p in frontier.points)


def test_knee_of_a_corner():
    corner = Frontier([1, 2, 10], [10, 2, 1], lambda index: (index,))
    assert corner.knee().choices == (1,)


def test_save_and_load(frontier, tmp_path):
    frontier.save(tmp_path / "frontier.json")
    loaded = Frontier.load(tmp_path / "frontier.json")
    assert loaded.points == frontier.points
    assert loaded.exact is True
    (tmp_path / "other.json").write_text('{"schema": "gnn_comm.plan", "version": 1}')
    with pytest.raises(ProblemError, match=r"gnn_comm\.plan version 1; expected autopar\.frontier"):
        Frontier.load(tmp_path / "other.json")


def test_csv_and_plot(frontier, tmp_path):
    frontier.to_csv(tmp_path / "frontier.csv")
    read = np.loadtxt(tmp_path / "frontier.csv", delimiter=",", skiprows=1)
    np.testing.assert_array_equal(read[:, 0], frontier.memory)
    pytest.importorskip("matplotlib", reason="plots need the plot extra")
    frontier.plot(tmp_path / "frontier.png", marks={"data parallel": (1e4, 1e4)})
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_a_budget_below_the_least_memory_names_it(frontier):
    with pytest.raises(InfeasibleError, match=f"least memory of any plan is {frontier.memory[0]:g}"):
        frontier.mini_time(memory=1)
    with pytest.raises(ProblemError, match=r"slowdown=0.5 is not valid: expected at least 1"):
        frontier.min_memory(slowdown=0.5)


def test_an_empty_frontier_says_why():
    forbidden = track(Problem([[(math.inf, 1)]]))
    with pytest.raises(InfeasibleError, match="every combination of choices is forbidden"):
        forbidden.mini_time()


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([[]], {}, r"nodes\[0\] has costs of shape"),
        ([[(1, 2, 3)]], {}, r"nodes\[0\] has costs of shape \(1, 3\)"),
        ([[(1, math.nan)]], {}, r"nodes\[0\] has the cost nan"),
        ([[(-1, 0)]], {}, r"nodes\[0\] has the cost -1\.0"),
        ([[(1, 1)]], {(0, 1): [[(0, 0)]]}, r"v=1 is not a node; expected 0 to 0"),
        ([[(1, 1)]], {(0, 0): [[(0, 0)]]}, r"joins a node with itself"),
        ([[(1, 1)], [(1, 1), (2, 0)]], {(0, 1): [[(0, 0)]]}, r"shape \(1, 1, 2\); expected \(1, 2, 2\)"),
    ],
)
def test_bad_problems_are_refused(nodes, edges, message):
    with pytest.raises(ProblemError, match=message):
        Problem(nodes, edges)


@pytest.mark.parametrize(
    ("option", "value"), [("eps", -0.1), ("eps", math.nan), ("max_cells", 0), ("max_conditions", 0)]
)
def test_bad_options_are_refused(option, value):
    with pytest.raises(ProblemError, match=f"{option}="):
        track(chain(3, 2), **{option: value})


def test_cost_wants_one_choice_per_node():
    with pytest.raises(ProblemError, match="choices has length 2; expected num_nodes=3"):
        chain(3, 2).cost([0, 1])


def test_fractional_costs_keep_twelve_digits():
    problem = Problem([[(0.1, 1e-9), (0.3, 1e-12)], [(0.2, 3e-10)]])
    np.testing.assert_allclose(track(problem).memory, [0.3, 0.5], rtol=1e-12)


def test_equal_plans_of_repeated_layers_count_once():
    """Float sums of the same costs in another order differ in the last bit; integers do not."""
    layer = [(0.1, 0.7), (0.3, 0.2)]
    frontier = track(Problem([layer] * 12))
    assert len(frontier) == 13


def test_order_sweeps_a_chain_from_one_end():
    edges = [(i, i + 1) for i in range(9)]
    order = elimination_order(10, edges)
    assert order in ([*range(10)], [*range(9, -1, -1)])


def test_residual_blocks_keep_a_low_width():
    edges = []
    for block in range(20):
        start = 4 * block
        edges += [(start, start + 1), (start + 1, start + 2), (start + 2, start + 3), (start, start + 3)]
        edges.append((start + 3, start + 4))
    sizes = [5] * 81
    cells, _ = largest_scope(elimination_order(81, edges), edges, sizes)
    assert cells == 5**3
