"""Features that cross a 100 Mbit link: the chosen strategy against data parallel, and against the bandwidth.

    python packages/gnn-parallel/benchmarks/bench_slow_link.py [--json FILE]

Four hosts of one rank each (network namespaces, needs root), features sharded by owner: 512 columns and 16 hidden
ones, where strategies differ most, and 128 columns and 32 hidden ones in large batches, where bytes weigh most. Prints
T(data parallel) / T(chosen), and T(chosen) over the time the busiest link needs for the payload bytes alone at 95 % of
its rate. Takes about three minutes, most of it for measuring the links.
"""

from __future__ import annotations

import argparse

from core_kernels.console import emit, table
from gnn_parallel.grid import Grid, run_grid


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    cells = []
    for num_features, hidden, batch_size in ((512, 16, 1024), (128, 32, 2048)):
        grid = Grid(
            hidden=(hidden,),
            methods=("random",),
            link_mbit=(100,),
            batch_sizes=(batch_size,),
            caches=("0%",),
            num_features=num_features,
            num_nodes=100_000,
            num_steps=2,
            num_rounds=4,
            measure_seconds=20.0,
        )
        cells += [{"num_features": num_features, **cell} for cell in run_grid(grid)]
    rows = [
        (
            f"{cell['num_features']}, {cell['hidden']}, {cell['batch_size']}",
            cell["chosen"],
            f"{cell['strategies'][cell['chosen']]['measured_step_seconds']:.3f} s",
            f"{cell['gdp_ratio'] / cell['regret']:.2f}",
            f"{cell['bandwidth_ratio']:.3f}",
            " ".join(f"{n}:{c['measured_step_seconds']:.2f}" for n, c in cell["strategies"].items()),
        )
        for cell in cells
    ]
    columns = (
        "features, hidden, seeds per step",
        "chosen",
        "step",
        "gdp over chosen",
        "over bytes / bandwidth",
        "all, seconds",
    )
    table("100 Mbit links, sharded features, random partition", columns, rows)
    emit({"cells": cells}, args.json)


if __name__ == "__main__":
    main()
