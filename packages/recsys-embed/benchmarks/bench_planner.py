"""Regret of the planner: the step time of its choice against the best of a sweep over hot-tier sizes, on shaped links.

    python bench_planner.py --settings 100:criteo:128,100:criteo:512,1000:criteo:512 --criteo criteo.npz        (root)

A setting is ``rate:data:batch``: Mbit/s, ``criteo`` or ``zipf``, samples per rank. Per setting the interconnect is
measured, the cost model chooses, a race of a few sizes chooses, and then 12 sizes and both choices are measured; sizes
take turns within every round, so that a slow moment of the machine hits all of them. The six settings given by default
take about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from core_kernels.interconnect import Interconnect
from core_kernels.testing import ShapedHosts
from recsys_embed import SGD, AccessStats, TieredEmbeddingBagCollection, plan_tiers
from recsys_embed.bench import BenchJob, bench_data, endless, measure_dense, own_steps
from recsys_embed.models import make_model
from recsys_embed.race import race_tiers

SETTINGS = "1000:criteo:128,1000:criteo:512,1000:criteo:1024,1000:zipf:512,100:criteo:128,100:criteo:256"
NUM_SIZES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--criteo", metavar="FILE.npz", help="real samples")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps per turn, after two that are not counted")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    settings = [s.split(":") for s in args.settings.split(",")]
    rows = []
    for rate, group in itertools.groupby(settings, key=lambda s: float(s[0])):
        with ShapedHosts([1] * 4, rate, timeout_seconds=120.0) as hosts:
            net = hosts.run(measure)[0]
            for _, data, batch in group:
                name = f"criteo:{args.criteo}" if data == "criteo" else data
                job = BenchJob("ours", name, int(batch), args.width, steps=args.steps, warmup=2, zipf_rows=2000)
                rows.append({"rate": rate, "data": data, "batch_size": int(batch)})
                rows[-1] |= hosts.run(sweep_on_rank, job, net, args.rounds, deadline_seconds=280.0)[0]
                print(json.dumps(rows[-1]), flush=True)
    summary = {
        who: {
            "worst_regret": max(r[who]["regret"] for r in rows),
            "median_regret": statistics.median(r[who]["regret"] for r in rows),
            "worst_against_none": max(r[who]["against_none"] for r in rows),
        }
        for who in ("model", "race")
    }
    best_without = sum(r["best"] == 0 for r in rows)
    print(json.dumps({"settings": len(rows), "settings_with_no_tier_best": best_without, **summary}, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"settings": rows, "summary": summary}, indent=1) + "\n")


def measure(group) -> Interconnect:
    return Interconnect.measure(group, budget_seconds=10.0)


def sweep_on_rank(group, job: BenchJob, net: Interconnect, rounds: int) -> dict:
    torch.manual_seed(0)
    data = bench_data(job)
    tables = data.tables(job.width)
    embeddings = TieredEmbeddingBagCollection(tables, None, SGD(0.05), group)
    model = make_model("dlrm", embeddings, data.dense.shape[1], job.hidden)
    stream = endless(data, job, group.rank, group.size)
    stats = AccessStats.from_batches((b.features for b in data.batches(job.batch_size, seed=99)), tables)

    def train() -> float:
        marks = own_steps(embeddings, model, job, list(itertools.islice(stream, job.warmup + job.steps)))
        seconds = [stop[0] - start[0] for start, stop in itertools.pairwise(marks[job.warmup :])]
        return statistics.median(seconds)

    train()  # loads code and opens connections
    dense = measure_dense(group, job)
    plan = plan_tiers(stats, net, tables, group.size, job.batch_size, SGD(0.05), dense_seconds=dense)
    plan = group.broadcast_object(plan)
    begin = time.perf_counter()
    raced = race_tiers(embeddings, stats, plan, train, rounds)
    race_seconds = time.perf_counter() - begin
    num_rows = sum(t.num_embeddings for t in tables)
    between = {round(50 * (num_rows / 50) ** (i / (NUM_SIZES - 2))) for i in range(NUM_SIZES - 1)}
    found = race_tiers(
        embeddings, stats, plan, train, rounds, sorted({0, plan.num_hot_rows, raced.plan.num_hot_rows} | between)
    ).step_seconds
    sweep = {size: found[size] for size in {0, *between}}
    best = min(sweep, key=lambda size: sweep[size])
    row = {"best": best, "dense_seconds": dense, "race_seconds": race_seconds, "ran": raced.step_seconds}
    for who, choice in (("model", plan), ("race", raced.plan)):
        took = found[choice.num_hot_rows]
        row[who] = {
            "hot_rows": choice.num_hot_rows,
            "regret": took / min(sweep.values()) - 1,
            "against_none": took / sweep[0] - 1,
        }
    row["predicted"] = {c.num_hot_rows: round(c.step_seconds, 4) for c in plan.candidates[::6]}
    row["chosen"] = asdict(plan.chosen) if plan.chosen else None
    return row | {"sweep": {size: round(seconds, 4) for size, seconds in sorted(sweep.items())}}


if __name__ == "__main__":
    main()
