"""Features that cross a 100 Mbit link: the chosen strategy against data parallel, and against the bandwidth.

    python packages/gnn-parallel/benchmarks/bench_slow_link.py [--batch-size 2048] [--json FILE]

Four hosts of one rank each (network namespaces, needs root), features of 512 columns sharded by owner, 16 hidden
columns, and a wider case. Prints T(data parallel) / T(chosen), and T(chosen) over the time the busiest link needs for
the payload bytes alone at 95 % of its rate. Takes about three minutes.
"""

from __future__ import annotations

import argparse

from core_kernels.console import emit, table
from gnn_parallel.grid import Grid, run_grid


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--hidden", default="16,256")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    grid = Grid(
        hidden=tuple(map(int, args.hidden.split(","))),
        methods=("random",),
        link_mbit=(100,),
        batch_sizes=(args.batch_size,),
        caches=("0%",),
        num_features=512,
        num_nodes=60_000,
        num_steps=1,
        num_rounds=2,
    )
    cells = list(run_grid(grid))
    rows = [
        (
            cell["hidden"],
            cell["chosen"],
            f"{cell['strategies'][cell['chosen']]['measured_step_seconds']:.3f} s",
            f"{cell['gdp_ratio'] / cell['regret']:.2f}",
            f"{cell['bandwidth_ratio']:.3f}",
            " ".join(f"{n}:{c['measured_step_seconds']:.2f}" for n, c in cell["strategies"].items()),
        )
        for cell in cells
    ]
    columns = ("hidden", "chosen", "step", "gdp over chosen", "over bytes / bandwidth", "all, seconds")
    table(f"100 Mbit links, 512 sharded features, {args.batch_size} seeds per step", columns, rows)
    emit({"cells": cells}, args.json)


if __name__ == "__main__":
    main()
