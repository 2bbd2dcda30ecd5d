"""Regret of the planner: the step time of its choice against the best of a sweep over hot-tier sizes, on shaped links.

    python bench_planner.py --rates 100,1000 --batches 128,512 --dataset criteo:criteo.npz     (root)

Sizes take turns within every round, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

from core_kernels.testing import ShapedHosts
from recsys_embed.bench import BenchJob, bench_on_rank, bench_plan
from recsys_embed.cli import measure_links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="100,1000")
    parser.add_argument("--batches", default="128,512")
    parser.add_argument("--dataset", default="zipf")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sizes", type=int, default=6, help="sizes of the sweep besides none and the choice")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    regrets = []
    for rate in (float(r) for r in args.rates.split(",")):
        with ShapedHosts([1] * 4, rate, timeout_seconds=120.0) as hosts:
            net = hosts.run(measure_links)[0]
            regrets += [sweep(hosts, net, rate, int(size), args) for size in args.batches.split(",")]
    values = [r["regret"] for r in regrets]
    print(json.dumps({"settings": len(values), "worst": max(values), "median": statistics.median(values)}))


def sweep(hosts, net, rate, batch_size, args) -> dict:
    base = BenchJob("ours", args.dataset, batch_size, args.width, steps=args.steps, warmup=2)
    choice = bench_plan(base, net, 4, 0.02)
    num_rows = sum(shape.num_embeddings for shape in choice.tables)
    between = [round(50 * (num_rows / 50) ** (i / (args.sizes - 1))) for i in range(args.sizes)]
    sizes = sorted({0, choice.num_hot_rows, *between})
    plans = {size: bench_plan(base, net, 4, 0.02, hot=size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    hosts.run(bench_on_rank, replace(base, plan=choice))  # loads code and opens connections
    for _ in range(args.repeats):
        for size, plan in plans.items():
            results = hosts.run(bench_on_rank, replace(base, plan=plan))
            seconds[size].append(max(r["median_step_seconds"] for r in results))
    best = {size: min(values) for size, values in seconds.items()}
    winner = min(best, key=lambda size: best[size])
    row = {
        "rate": rate,
        "batch_size": batch_size,
        "chosen": choice.num_hot_rows,
        "best": winner,
        "regret": best[choice.num_hot_rows] / best[winner] - 1,
        "against_none": best[choice.num_hot_rows] / best[0] - 1,
        "predicted": choice.chosen.step_seconds if choice.chosen else None,
        "measured": best[choice.num_hot_rows],
        "sweep": {size: round(value, 4) for size, value in best.items()},
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
