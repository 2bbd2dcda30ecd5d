"""Train under every plan of the frontier and on one device, and compare parameters, states, collectives.

For six small models and the meshes 2, 4 and 2x2, ranks take three steps of AdamW under each plan, and every rank
compares its parts with one device. A row gives the largest difference, whether every rank sent what was predicted, call
by call and byte by byte, and whether stored bytes are those predicted. Dropout is part of it: draws depend on the
element, so one device drops the same elements.

    python packages/autopar/benchmarks/bench_equal.py --mesh 2                    # about 2 minutes
    python packages/autopar/benchmarks/bench_equal.py --json equal.json --seconds 500      # again until nothing is left

With ``--json`` every finished chunk of plans is kept, and a later call goes on where it ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from autopar import Cluster, Plan, apply, models, search, trace
from autopar.memory import stored_bytes
from autopar.verification import compare_steps, train_steps
from core_kernels.comm import Group
from core_kernels.console import say, table
from core_kernels.testing import RankPool

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# Some gradients are zero in exact arithmetic: of a bias of attention keys, of one in front of a normalisation. AdamW
# divides their rounding by eps; torch's 1e-8 is as small as the rounding of float32 and would turn it into whole steps,
# on one device with another number of threads too.
EPS = {"float64": 1e-8, "float32": 1e-4}
CHUNK = 32
NUM_STEPS = 3


@functools.cache
def reference(name: str, dtype: str) -> tuple:
    """Return a small model, its batch and graph, and the losses and state of one device; once per process."""
    model, batch = models.small(name, getattr(torch, dtype))
    graph = trace(model, batch)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    losses, state, _ = train_steps(apply(model, plan, graph, Group.single()), batch, NUM_STEPS, EPS[dtype])
    return model, batch, graph, losses, state


def compare_plans(group: Group, name: str, dtype: str, plans: list[Plan]) -> list[dict[str, Any]]:
    """Train under each plan and compare this rank's parts with one device. Collective: all ranks."""
    model, batch, graph, losses, state = reference(name, dtype)
    found = []
    for plan in plans:
        parallel = apply(model, plan, graph, group, verify=False)
        compared = compare_steps(parallel, batch, losses, state, EPS[dtype])
        same_bytes = stored_bytes(parallel) == (plan.predicted.parameter_bytes, plan.predicted.buffer_bytes)
        found.append(vars(compared) | {"stored_bytes_match": same_bytes})
    return found


def advance(row: dict[str, Any], num_plans: int, ranks: list[list[dict[str, Any]]]) -> None:
    """Add what all ranks found for some plans to a row."""
    for place in range(num_plans):
        results = [rank[place] for rank in ranks]
        worst = max(results, key=lambda result: result["largest_error"])
        if not worst["largest_error"] <= row["largest_error"]:
            row["largest_error"], row["worst"] = worst["largest_error"], worst["worst"]
        row["relative_error"] = max(row["relative_error"], *(result["relative_error"] for result in results))
        row["differing"] += not max(result["relative_error"] for result in results) <= TOLERANCE[row["dtype"]]
        row["collectives_differ"] += not all(result["collectives_match"] for result in results)
        row["stored_bytes_differ"] += not all(result["stored_bytes_match"] for result in results)
        row["done"] += 1


def new_row(name: str, mesh: str, dtype: str) -> dict[str, Any]:
    """Return a row without plans."""
    counts = dict.fromkeys(("plans", "done", "differing", "collectives_differ", "stored_bytes_differ"), 0)
    errors = {"largest_error": 0.0, "relative_error": 0.0, "worst": "", "seconds": 0.0}
    return {"model": name, "mesh": mesh, "dtype": dtype} | counts | errors


def run_row(pool: RankPool, row: dict[str, Any], end: float, keep: Any) -> None:
    """Run the plans of a row that are left, until ``end``."""
    mesh = tuple(int(size) for size in row["mesh"].split("x"))
    graph = reference(row["model"], row["dtype"])[2]
    frontier = search(graph, Cluster.preset("loopback-cpu", math.prod(mesh)), [mesh])
    row["plans"] = len(frontier)
    while row["done"] < row["plans"] and time.monotonic() < end:
        begin = time.monotonic()
        places = range(row["done"], min(row["done"] + CHUNK, row["plans"]))
        plans = [frontier[place] for place in places]
        ranks = pool.run(compare_plans, row["model"], row["dtype"], plans, deadline_seconds=550)
        advance(row, len(plans), ranks)
        row["seconds"] += time.monotonic() - begin
        keep()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    shown = []
    for row in rows:
        different = [str(row[key]) for key in ("differing", "collectives_differ", "stored_bytes_differ")]
        sizes = f"{row['largest_error']:.1e}", f"{row['relative_error']:.1e}"
        shown.append((row["model"], row["mesh"], row["dtype"], f"{row['done']} of {row['plans']}", *sizes, *different))  # fmt: skip  # noqa: E501
    columns = ["model", "mesh", "dtype", "plans run", "largest error", "relative", "differ", "other collectives",
               "other stored bytes"]  # fmt: skip
    table("three steps of AdamW, every plan against one device", columns, shown)


def main() -> None:
    """Compare, print the table and end with 1 when a plan differs or is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(models.SMALL_SIZES)
    parser.add_argument("--mesh", action="append", help="2, 4 or 2x2; all when left out")
    parser.add_argument("--model", action="append", choices=names, help="may be repeated; all when left out")
    parser.add_argument("--dtype", action="append", choices=sorted(TOLERANCE), help="both when left out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about so many; no limit by default")
    parser.add_argument("--json", help="file for the rows; rows it holds already are continued")
    args = parser.parse_args()
    path = Path(args.json) if args.json else None
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def keep() -> None:
        if path:
            path.write_text(json.dumps(rows, indent=1) + "\n")

    end = time.monotonic() + args.seconds
    wanted = []
    for mesh in args.mesh or ["2", "2x2", "4"]:
        for dtype in args.dtype or sorted(TOLERANCE, reverse=True):
            for name in args.model or names:
                key = {"model": name, "mesh": mesh, "dtype": dtype}
                row = next((row for row in rows if row.items() >= key.items()), None)
                if row is None:
                    rows.append(row := new_row(name, mesh, dtype))
                wanted.append(row)
    for size in sorted({math.prod(map(int, row["mesh"].split("x"))) for row in wanted}):
        with RankPool(size, timeout_seconds=60.0) as pool:
            for row in wanted:
                is_open = not row["plans"] or row["done"] < row["plans"]
                if math.prod(map(int, row["mesh"].split("x"))) == size and is_open and time.monotonic() < end:
                    run_row(pool, row, end, keep)
                    say(json.dumps(row))
    show(wanted)
    left = sum(not row["plans"] or row["done"] < row["plans"] for row in wanted)
    wrong = sum(row["differing"] or row["collectives_differ"] or row["stored_bytes_differ"] for row in wanted)
    if wrong or left:
        raise SystemExit(f"{wrong} rows with a plan that differs, {left} rows that are not finished")


if __name__ == "__main__":
    main()
