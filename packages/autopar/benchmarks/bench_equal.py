"""Train under every plan of the frontier and on one device, and compare parameters, states, collectives, memory.

For six small models and the meshes 2, 4 and 2x2, ranks take three steps of AdamW under each plan. A row gives the
largest difference to one device, whether every rank sent what was predicted, call by call and byte by byte, whether
stored bytes are those predicted, and by how much the predicted peak misses the allocator's.

    python packages/autopar/benchmarks/bench_equal.py --mesh 2x2      # one mesh in float64: about 2 minutes
    python packages/autopar/benchmarks/bench_equal.py --dtype float32 --mesh 4
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from autopar import Cluster, apply, models, search, trace
from autopar.memory import peak_step_bytes, stored_bytes
from autopar.verification import train_steps
from core_kernels.comm import Group
from core_kernels.console import say, table
from core_kernels.testing import RankPool

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 1, "width": 16, "vocabulary": 32, "dropout": 0.1, "tied": True},
    "lstm": {},
    "mlp": {"dropout": 0.2},
    "mlp_mixer": {"blocks": 1, "width": 16, "image": 16, "patch": 4, "batch": 4, "classes": 8},
    "vgg16": {"image": 32, "shrink": 16, "hidden": 32, "classes": 8, "batch": 8, "dropout": 0.5},
    "wide_resnet": {"depths": (1, 1), "width": 4, "image": 16, "batch": 4, "classes": 8},
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def make(name: str, dtype: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a small model and its batch, the same on every rank."""
    torch.manual_seed(0)
    model, batch = models.FACTORIES[name](**SMALL[name])
    kind = getattr(torch, dtype)
    return model.to(kind), tuple(x.to(kind) if x.is_floating_point() else x for x in batch)


def train_plans(group: Group, name: str, plans: list, dtype: str, measure_every: int) -> list:
    """Train under each plan; return per plan the state of rank 0 and what was counted."""
    model, batch = make(name, dtype)
    graph = trace(model, batch)
    results = []
    for number, plan in enumerate(plans):
        parallel = apply(model, plan, graph, group)
        losses, state, counted = train_steps(parallel, batch, 3)
        as_predicted = counted == parallel.predicted_collectives()
        peak = peak_step_bytes(parallel, batch) if number % measure_every == 0 else None
        same_bytes = stored_bytes(parallel) == (plan.predicted.parameter_bytes, plan.predicted.buffer_bytes)
        results.append((losses, state if group.rank == 0 else None, as_predicted, same_bytes, peak))
    return results


def train_single(name: str, dtype: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one device, without any split."""
    model, batch = make(name, dtype)
    graph = trace(model, batch)
    plan = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    losses, state, _ = train_steps(apply(model, plan, graph, Group.single()), batch, 3)
    return losses, state


def compare(pool: RankPool, name: str, mesh: tuple[int, ...], dtype: str, measure_every: int) -> dict[str, Any]:
    """Run every plan of one model on one mesh and return a row."""
    losses, expected = train_single(name, dtype)
    frontier = search(trace(*make(name, dtype)), Cluster.preset("loopback-cpu", math.prod(mesh)), [mesh])
    plans = [frontier[index] for index in range(len(frontier))]
    begin = time.perf_counter()
    ranks = pool.run(train_plans, name, plans, dtype, measure_every, deadline_seconds=550)
    error = relative = 0.0
    for found, state, *_ in ranks[0]:
        error = max(error, *(abs(a - b) for a, b in zip(found, losses, strict=True)))
        for key, value in expected.items():
            if value.numel():
                gap = (state[key].double() - value.double()).abs()
                error = max(error, float(gap.max()))
                relative = max(relative, float((gap / (1 + value.double().abs())).max()))
    misses = [
        plan.predicted.memory_bytes / max(rank[place][4] for rank in ranks) - 1
        for place, plan in enumerate(plans)
        if ranks[0][place][4] is not None
    ]
    return {
        "model": name,
        "mesh": "x".join(map(str, mesh)),
        "plans": len(plans),
        "largest_error": error,
        "relative_error": relative,
        "collectives_match": all(result[2] for rank in ranks for result in rank),
        "stored_bytes_match": all(result[3] for rank in ranks for result in rank),
        "peak_misses": misses,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    """Compare, print the table and end with 1 when a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="2, 4 or 2x2; all when left out")
    parser.add_argument("--model", action="append", choices=sorted(SMALL), help="may be repeated; all when left out")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float64")
    parser.add_argument("--measure-every", type=int, default=8, help="plans between two measured peaks")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for text in args.mesh or ["2", "4", "2x2"]:
        mesh = tuple(int(size) for size in text.split("x"))
        with RankPool(math.prod(mesh), timeout_seconds=60.0) as pool:
            for name in args.model or sorted(SMALL):
                rows.append(compare(pool, name, mesh, args.dtype, args.measure_every))
                row = {key: value for key, value in rows[-1].items() if key != "peak_misses"}
                say(json.dumps(row))
                if args.json:
                    Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    shown = [
        (
            row["model"], row["mesh"], row["plans"], f"{row['largest_error']:.1e}", row["collectives_match"],
            row["stored_bytes_match"], f"{min(row['peak_misses']):+.1%} to {max(row['peak_misses']):+.1%}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ["model", "mesh", "plans run", "largest error", "collectives equal", "stored bytes equal", "peak"]
    table(f"three steps of AdamW in {args.dtype}, every plan against one device", columns, shown)
    tolerance = TOLERANCE[args.dtype]
    wrong = [r for r in rows if not (r["largest_error"] <= tolerance and r["collectives_match"])]
    if wrong:
        raise SystemExit(f"{len(wrong)} rows differ by more than {tolerance:g} or sent something else")


if __name__ == "__main__":
    main()
