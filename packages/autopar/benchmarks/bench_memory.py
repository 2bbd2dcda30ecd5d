"""Predicted memory against what torch's allocator reports: states exactly, the peak of one step of AdamW.

Models are sized so that tensors, not the buffers of kernels, make up the peak. One device first, then plans spread over
the frontier of two ranks; a row gives the range of predicted over measured.

    python packages/autopar/benchmarks/bench_memory.py      # about 2 minutes
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar import Cluster, Plan, apply, models, search, trace
from autopar.memory import peak_step_bytes, stored_bytes
from core_kernels.comm import Group
from core_kernels.console import format_bytes, table
from core_kernels.testing import RankPool

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 128, "heads": 4, "vocabulary": 512, "length": 64, "batch": 8, "dropout": 0.1},
    "lstm": {"layers": 2, "width": 128, "vocabulary": 512, "length": 8, "batch": 32},
    "mlp": {"width": 512, "hidden": 2048, "classes": 64, "batch": 256},
    "mlp_mixer": {"blocks": 2, "width": 128, "image": 64, "patch": 8, "batch": 16, "classes": 64},
    "vgg16": {"image": 64, "shrink": 8, "hidden": 512, "classes": 64, "batch": 16, "dropout": 0.5},
    "wide_resnet": {"depths": (1, 1), "width": 16, "image": 64, "batch": 16, "classes": 64},
}


@functools.cache
def make(name: str) -> tuple:
    """Return a model, its batch and its graph, the same on every rank."""
    torch.manual_seed(0)
    model, batch = models.FACTORIES[name](**SIZES[name])
    return model, batch, trace(model, batch)


def measure(group: Group, name: str, plans: list[Plan]) -> list[tuple[bool, int]]:
    """Return per plan whether stored bytes are as predicted, and the peak. Collective: all ranks."""
    model, batch, graph = make(name)
    found = []
    for plan in plans:
        parallel = apply(model, plan, graph, group, verify=False)
        same = stored_bytes(parallel) == (plan.predicted.parameter_bytes, plan.predicted.buffer_bytes)
        found.append((same, peak_step_bytes(parallel, batch)))
    return found


def compare(pool: RankPool, name: str, num_plans: int) -> dict[str, Any]:
    """Return a row: one device, and plans of two ranks."""
    graph = make(name)[2]
    single = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
    same, peak = measure(Group.single(), name, [single])[0]
    frontier = search(graph, Cluster.preset("loopback-cpu", pool.world_size), [(pool.world_size,)])
    places = np.unique(np.linspace(0, len(frontier) - 1, num_plans).round().astype(int))
    plans = [frontier[int(place)] for place in places]
    ranks = pool.run(measure, name, plans, deadline_seconds=300)
    peaks = [max(rank[place][1] for rank in ranks) for place in range(len(plans))]
    misses = [plan.predicted.memory_bytes / peak - 1 for plan, peak in zip(plans, peaks, strict=True)]
    return {
        "model": name,
        "predicted": single.predicted.memory_bytes,
        "measured": peak,
        "miss": single.predicted.memory_bytes / peak - 1,
        "plans": len(plans),
        "misses": misses,
        "mean_miss": float(np.abs(misses).mean()),
        "stored_bytes_match": same and all(result[0] for rank in ranks for result in rank),
    }


def main() -> None:
    """Measure and print a table; end with 1 when stored bytes differ or a single device's peak misses by over 5 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(SIZES), help="may be repeated; all when left out")
    parser.add_argument("--plans", type=int, default=8, help="plans of two ranks to measure (default %(default)s)")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    with RankPool(2, timeout_seconds=60.0) as pool:
        rows = [compare(pool, name, args.plans) for name in args.model or sorted(SIZES)]
    shown = [
        (
            row["model"], format_bytes(row["predicted"]), format_bytes(row["measured"]), f"{row['miss']:+.1%}",
            row["plans"], f"{min(row['misses']):+.1%} to {max(row['misses']):+.1%}", f"{row['mean_miss']:.1%}",
            row["stored_bytes_match"],
        )
        for row in rows
    ]  # fmt: skip
    columns = ["model", "predicted", "measured", "miss", "plans of 2", "their misses", "mean", "states equal"]
    table("peak of a step, one device and two ranks", columns, shown)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row["model"] for row in rows if abs(row["miss"]) > 0.05 or not row["stored_bytes_match"]]
    if wrong:
        raise SystemExit(f"short of the mark: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
