"""The whole frontier against an integer program: same optimum at every memory budget, and how long each takes.

For each model and mesh the search problem (variables, choices, costs) is written down twice: for frontier tracking,
and as a 0-1 program that scipy's HiGHS solves once per budget. Budgets are spread over the frontier. A gap is by how
much the frontier's time at a budget differs from the program's optimum there; it must be 0. A solve that is stopped at
the limit leaves a lower bound of the optimum; the gap to that is reported apart. Times are processor seconds, tracking
after one run that compiles it.

    python packages/autopar/benchmarks/bench_exact.py --budgets 3                   # about 3 minutes
    python packages/autopar/benchmarks/bench_exact.py --json exact.json --seconds 500     # again until nothing is left

With ``--json`` every solve is kept, and a later call goes on where it ended.
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


# HiGHS lets a budget be exceeded by its feasibility tolerance.
_TOLERANCE = 1e-6


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

    def solve(self, budget: float, limit_seconds: float) -> dict[str, float]:
        """Return the least seconds within a memory budget, the lower bound proved and the processor seconds it took."""
        seconds, memory = np.array(self.seconds), np.array(self.memory)
        scale = max(seconds.max(), 1e-12)
        within = LinearConstraint(memory[None, :] / budget, ub=1.0)
        integral = np.zeros(len(memory))
        integral[: self.num_choices] = 1  # pairs follow
        begin = time.process_time()
        found = milp(
            seconds / scale,
            integrality=integral,
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(self.agree, self.wanted, self.wanted), within],
            options={"mip_rel_gap": 1e-9, "time_limit": limit_seconds},
        )
        took = time.process_time() - begin
        best = float(found.fun) * scale if found.fun is not None else np.inf
        bound = best if found.status == 0 else float(found.mip_dual_bound or 0.0) * scale
        return {"budget": budget, "best": best, "bound": bound, "proved": found.status == 0, "solve_seconds": took}


def run_row(row: dict[str, Any], num_budgets: int, limit_seconds: float, end: float, keep: Callable[[], None]) -> None:
    """Track the frontier of one model and mesh, then solve the budgets that are left, until ``end``."""
    mesh = tuple(int(size) for size in row["mesh"].split("x"))
    with fake_tensors():
        model, inputs = MODELS[row["model"]]()
    problem = SearchSpace(trace(model, inputs), mesh, Cluster.preset("a100-nvlink-8")).problem()
    track(problem)  # compiles
    begin = time.process_time()
    frontier = track(problem)
    row["track_seconds"] = time.process_time() - begin
    row |= {"nodes": problem.num_nodes, "points": len(frontier), "exact": frontier.exact}
    program = Program(problem)
    places = np.unique(np.linspace(0, len(frontier) - 1, num_budgets).round().astype(int))
    row["budgets"] = len(places)
    # The middle ones first, so that a row that is stopped has not only easy ends.
    for place in sorted(places.tolist(), key=lambda place: abs(place - len(frontier) // 2)):
        # Half a byte more, so that rounding inside the solver does not forbid the point itself.
        budget = float(frontier.memory[place]) + 0.5
        if any(solve["budget"] == budget for solve in row["solves"]):
            continue
        if time.monotonic() > end:
            break
        row["solves"].append(program.solve(budget, limit_seconds) | {"tracked": float(frontier.seconds[place])})
        keep()


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's figures without its solves."""
    proved = [solve for solve in row["solves"] if solve["proved"]]
    stopped = [solve for solve in row["solves"] if not solve["proved"]]
    median = float(np.median([solve["solve_seconds"] for solve in row["solves"]])) if row["solves"] else np.nan
    return {key: value for key, value in row.items() if key != "solves"} | {
        "proved": len(proved),
        "stopped": len(stopped),
        "largest_gap": max((abs(s["tracked"] / s["best"] - 1) for s in proved), default=0.0),
        # Of solves that were stopped: the frontier over the bound proved, and over the best the program had found.
        "gap_to_bound": max((s["tracked"] / s["bound"] - 1 if s["bound"] else np.inf for s in stopped), default=0.0),
        "solve_seconds": median,
        "least_solve_seconds": min((s["solve_seconds"] for s in row["solves"]), default=np.nan),
        "share_of_one_solve": row["track_seconds"] / median,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    shown = []
    for found in map(summary, rows):
        seconds = (f"{found[key]:.2f} s" for key in ("track_seconds", "solve_seconds"))
        solved = f"{found['proved']} of {found['budgets']}", found["stopped"]
        gaps = f"{found['largest_gap']:.1e}", f"{found['gap_to_bound']:.1e}" if found["stopped"] else ""
        shown.append((found["model"], found["mesh"], found["points"], *seconds, f"{found['share_of_one_solve']:.2f}", *solved, *gaps))  # fmt: skip  # noqa: E501
    columns = ["model", "mesh", "points", "whole frontier", "one solve", "share", "proved", "stopped", "largest gap",
               "to bound"]  # fmt: skip
    table("frontier tracking against scipy's milp (HiGHS)", columns, shown)


def main() -> None:
    """Compare, print the table and end with 1 when an optimum differs or a budget is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="8 or 2x4; both when left out")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated; all when left out")
    parser.add_argument("--budgets", type=int, default=20, help="memory budgets per model (default %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of one solve (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=np.inf, help="stop after about so many; no limit by default")
    parser.add_argument("--json", help="file for the rows; rows it holds already are continued")
    args = parser.parse_args()
    path = Path(args.json) if args.json else None
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def keep() -> None:
        if path:
            path.write_text(json.dumps(rows, indent=1) + "\n")

    end = time.monotonic() + args.seconds
    wanted = []
    for mesh in args.mesh or ["8", "2x4"]:
        for name in args.model or MODELS:
            row = next((row for row in rows if (row["model"], row["mesh"]) == (name, mesh)), None)
            if row is None:
                rows.append(row := {"model": name, "mesh": mesh, "budgets": args.budgets, "solves": []})
            if len(row["solves"]) < row["budgets"] and time.monotonic() < end:
                run_row(row, args.budgets, args.limit, end, keep)
                say(json.dumps(summary(row)))
            if row["solves"]:
                wanted.append(row)
    keep()
    show(wanted)
    gap = max((summary(row)["largest_gap"] for row in wanted), default=0.0)
    left = sum(row["budgets"] - len(row["solves"]) for row in rows)
    if gap > _TOLERANCE or left:
        raise SystemExit(f"the largest gap is {gap:.1e}, {left} solves are left")


if __name__ == "__main__":
    main()
