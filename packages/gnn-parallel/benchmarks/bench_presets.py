"""Which strategy wins where: plans for machines that are not at hand, as hidden size, feature width and hosts grow.

    python packages/gnn-parallel/benchmarks/bench_presets.py [--nodes 100000] [--json FILE]

Features are sharded. A cell names the cheapest strategy and how much slower data parallel over all ranks would be; "xH"
stands for the strategy inside each of H hosts. Nothing is measured; presets state their assumptions. Takes about two
minutes.
"""

from __future__ import annotations

import argparse

import torch

from core_kernels import datasets, partition_graph
from core_kernels.console import emit, table
from core_kernels.interconnect import Interconnect
from gnn_parallel import make_model, plan
from gnn_parallel.cost_model import Rates

MACHINES = [
    ("ethernet-1gbit", "4x1"),
    ("ethernet-10gbit", "4x1"),
    ("ethernet-10gbit", "4x4"),
    ("pcie4-8", "1x8"),
    ("a100-nvlink-8", "1x8"),
    ("a100-8x8-ib", "2x8"),
    ("a100-8x8-ib", "8x8"),
]
HIDDEN = (8, 32, 128, 512)
WIDTHS = (64, 256, 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    data = datasets.sbm(args.nodes, num_classes=64, average_degree=15, num_features=1, seed=1)
    books, rows, found = {}, [], []
    for name, shape in MACHINES:
        hosts, per_host = map(int, shape.split("x"))
        num_ranks = hosts * per_host
        if num_ranks not in books:
            books[num_ranks] = partition_graph(data.graph, num_ranks)
        interconnect = Interconnect.preset(name)
        for width in WIDTHS:
            cells = []
            for hidden in HIDDEN:
                made = plan(
                    data.graph,
                    make_model("sage", width, hidden, 64, 2),
                    features=torch.zeros(1, width).expand(args.nodes, width),
                    partition=books[num_ranks],
                    fanouts=[10, 10],
                    batch_size=256 * num_ranks,
                    placement="sharded",
                    rates=Rates.of(interconnect),
                    interconnect=interconnect,
                    group_shape=shape,
                    num_steps=1,
                )
                ratio = made.candidate("gdp").predicted_seconds / made.predicted.predicted_seconds
                hybrid = f" x{made.num_hosts}" if made.num_hosts > 1 else ""
                cells.append(f"{made.strategy}{hybrid} {ratio:.1f}")
                found.append(
                    {"machine": name, "shape": shape, "width": width, "hidden": hidden, "strategy": made.strategy}
                    | {"num_hosts": made.num_hosts, "gdp_ratio": ratio, "fewer": made.recommended_ranks}
                )
            rows.append((f"{name} {shape}", width, *cells))
    table("cheapest strategy, and data parallel over it", ("machine", "features", *map(str, HIDDEN)), rows)
    emit({"cells": found}, args.json)


if __name__ == "__main__":
    main()
