"""What preparing batches in the background saves: every strategy with and without, on four shaped hosts, interleaved.

    python packages/gnn-parallel/benchmarks/bench_look_ahead.py [--link 1000] [--batch-size 512] [--json FILE]

256 feature columns sharded by owner, random partition, 32 hidden columns. Prints the median and the quickest step, and
the processor time of all ranks. Needs root. Takes about one minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from core_kernels import datasets, partition_graph
from core_kernels.console import emit, table
from core_kernels.testing import ShapedHosts
from gnn_parallel.bench import StrategyRunner
from gnn_parallel.jobs import LabelledGraph, TrainJob, make_plan
from gnn_parallel.strategies import STRATEGIES

NUM_HOSTS, NUM_ROUNDS, NUM_STEPS = 4, 6, 3


def make_data():
    made = datasets.sbm(20_000, num_classes=20, average_degree=15, num_features=256, seed=1)
    return LabelledGraph.of(made)


def time_on_rank(group, batch_size):
    data = make_data()
    book = partition_graph(data.graph, group.size, "random")
    job = TrainJob(hidden=32, batch_size=batch_size, dropout=0.0, placement="sharded", is_shown=False)
    runners = {}
    for look_ahead in (0, 2):
        plan = make_plan(job, data, book, group, measure=False, num_steps=1, look_ahead=look_ahead)
        for name in STRATEGIES:
            chosen = replace(plan, strategy=name).with_data(plan.data)
            runners[f"{name} {look_ahead}"] = StrategyRunner(job, data, chosen, group)
    found = {name: [] for name in runners}
    for number in range(NUM_ROUNDS + 1):
        for name, runner in runners.items():
            used = time.process_time()
            seconds = runner.run(NUM_STEPS, is_counted=number > 0)
            mine = torch.tensor([seconds, (time.process_time() - used) / NUM_STEPS], dtype=torch.float64)
            slowest, total = group.all_reduce(mine, op="max")[0], group.all_reduce(mine)[1]
            if number:
                found[name].append((float(slowest), float(total)))
    return {name: tuple(zip(*values, strict=True)) for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=int, default=1000, metavar="MBIT")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with ShapedHosts([1] * NUM_HOSTS, link_rate_mbit=args.link) as hosts:
        found = hosts.run(time_on_rank, args.batch_size)[0]
    rows = [
        (name, *(f"{1e3 * seconds:.0f} ms" for seconds in (statistics.median(wall), min(wall), statistics.median(cpu))))
        for name, (wall, cpu) in sorted(found.items())
    ]
    table(f"one step, {args.link} Mbit", ("strategy, batches ahead", "median", "quickest", "CPU, all ranks"), rows)
    emit({"seconds": found}, args.json)


if __name__ == "__main__":
    main()
