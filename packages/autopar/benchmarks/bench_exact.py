"""The whole frontier against an integer program: same optimum at every memory budget, and how long each takes.

For each model and mesh the search problem (variables, choices, costs) is written down twice: for frontier tracking,
and as a 0-1 program that scipy's HiGHS solves once per budget. Budgets are spread over the frontier. A gap is what the
program's optimum is below the frontier's time at that budget; it must be 0. Times are processor seconds, tracking after
one run that compiles it.

    python packages/autopar/benchmarks/bench_exact.py --mesh 8 --budgets 20      # about 4 minutes
    python packages/autopar/benchmarks/bench_exact.py --mesh 2x4 --model vgg16 --budgets 3
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from autopar import Cluster, Problem, fake_tensors, models, trace, track
from autopar.space import SearchSpace
from core_kernels.console import say, table

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-12": lambda: models.gpt(12, 768, 12, 50304, 1024, 8),
    "vgg16": models.vgg16,
    "wide_resnet50": models.wide_resnet,
    "lstm": lambda: models.lstm(layers=2, width=512, vocabulary=8192, length=8, batch=64),
    "mlp_mixer": models.mlp_mixer,
}


class Program:
    """A search problem as a 0-1 program: one variable per allowed choice, one per allowed pair along an edge.

    The choice of a node is one of its own; pairs agree with the choices at both ends. Costs are scaled to about 1.
    """

    def __init__(self, problem: Problem):
        self.memory: list[float] = []
        self.seconds: list[float] = []
        rows: list[int] = []
        columns: list[int] = []
        signs: list[float] = []
        wanted: list[float] = []
        column_of: list[dict[int, int]] = []

        def add(cost: np.ndarray) -> int:
            self.memory.append(cost[0])
            self.seconds.append(cost[1])
            return len(self.memory) - 1

        def constrain(ones: list[int], minus: list[int], value: float) -> None:
            for members, sign in ((ones, 1.0), (minus, -1.0)):
                rows.extend([len(wanted)] * len(members))
                columns.extend(members)
                signs.extend([sign] * len(members))
            wanted.append(value)

        for costs in problem.node_costs:
            column_of.append({k: add(cost) for k, cost in enumerate(costs) if np.isfinite(cost).all()})
            constrain(list(column_of[-1].values()), [], 1.0)
        self.num_choices = len(self.memory)
        for u, v, costs in problem.edge_costs:
            pairs = {
                (i, j): add(costs[i, j]) for i in column_of[u] for j in column_of[v] if np.isfinite(costs[i, j]).all()
            }
            for end, node in enumerate((u, v)):
                for choice, column in column_of[node].items():
                    constrain([c for pair, c in pairs.items() if pair[end] == choice], [column], 0.0)
        self.agree = coo_matrix((signs, (rows, columns)), shape=(len(wanted), len(self.memory))).tocsr()
        self.wanted = np.array(wanted)

    def solve(self, budget: float, limit_seconds: float) -> tuple[float, bool]:
        """Return the least seconds within a memory budget and whether that was proved in time."""
        seconds, memory = np.array(self.seconds), np.array(self.memory)
        scale = max(seconds.max(), 1e-12)
        within = LinearConstraint(memory[None, :] / budget, ub=1.0)
        integral = np.zeros(len(memory))
        integral[: self.num_choices] = 1  # pairs follow
        found = milp(
            seconds / scale,
            integrality=integral,
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(self.agree, self.wanted, self.wanted), within],
            options={"mip_rel_gap": 1e-9, "time_limit": limit_seconds},
        )
        return (float(found.fun) * scale if found.fun is not None else np.inf), found.status == 0


def compare(name: str, mesh: tuple[int, ...], num_budgets: int, limit_seconds: float) -> dict[str, Any]:
    """Track a frontier, solve the program at each budget, and return a row."""
    with fake_tensors():
        model, inputs = MODELS[name]()
    problem = SearchSpace(trace(model, inputs), mesh, Cluster.preset("a100-nvlink-8")).problem()
    track(problem, eps=0.05)
    begin = time.process_time()
    frontier = track(problem)
    track_seconds = time.process_time() - begin
    program = Program(problem)
    places = np.unique(np.linspace(0, len(frontier) - 1, num_budgets).round().astype(int))
    gaps, solve_seconds, unproved = [], [], 0
    for place in places:
        begin = time.process_time()
        # Half a byte more, so that rounding inside the solver does not forbid the point itself.
        best, proved = program.solve(float(frontier.memory[place]) + 0.5, limit_seconds)
        solve_seconds.append(time.process_time() - begin)
        unproved += not proved
        gaps.append(float(frontier.seconds[place]) / best - 1 if proved else 0.0)
    return {
        "model": name,
        "mesh": "x".join(map(str, mesh)),
        "nodes": problem.num_nodes,
        "points": len(frontier),
        "exact": frontier.exact,
        "track_seconds": track_seconds,
        "budgets": len(places),
        "unproved": unproved,
        "largest_gap": max(gaps),
        "solve_seconds": sorted(solve_seconds),
        "share_of_one_solve": track_seconds / float(np.median(solve_seconds)),
    }


def main() -> None:
    """Compare, print the table and end with 1 when an optimum differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="8 or 2x4; both when left out")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated; all when left out")
    parser.add_argument("--budgets", type=int, default=20, help="memory budgets per model (default %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="most seconds of one solve (default %(default)s)")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in args.mesh or ["8", "2x4"]:
        for name in args.model or MODELS:
            rows.append(compare(name, tuple(int(size) for size in text.split("x")), args.budgets, args.limit))
            say(json.dumps(rows[-1] | {"solve_seconds": float(np.median(rows[-1]["solve_seconds"]))}))
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    shown = [
        (
            row["model"], row["mesh"], row["points"], f"{row['track_seconds']:.2f} s",
            f"{np.median(row['solve_seconds']):.2f} s", f"{row['share_of_one_solve']:.2f}",
            f"{row['budgets'] - row['unproved']} of {row['budgets']}", f"{row['largest_gap']:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ["model", "mesh", "points", "whole frontier", "one solve", "share", "budgets proved", "largest gap"]
    table("frontier tracking against scipy's milp (HiGHS)", columns, shown)
    if any(abs(row["largest_gap"]) > 1e-7 for row in rows):
        raise SystemExit("an optimum differs")


if __name__ == "__main__":
    main()
