"""A MovieLens epoch against PyG's NeighborLoader loop: on one rank, or on two under DistributedDataParallel.

    python packages/gnn-parallel/benchmarks/bench_epoch.py [--ranks 1] [--rounds 5] [--json FILE]

Both train the same GraphSAGE (batch 256 over all ranks, fanouts 10,10, hidden 64), one rank with two threads or two
with one each. Epochs take turns in the same processes; wall is that of the slowest rank, CPU the sum of all. Takes
about one minute. PyG needs torch-sparse or pyg-lib for its sampler.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from core_kernels import datasets, launch, partition_graph
from core_kernels.console import emit, table
from gnn_parallel import Engine, make_model, plan

BATCH_SIZE, FANOUTS, HIDDEN = 256, [10, 10], 64


class PygSage(nn.Module):
    def __init__(self, width, hidden, num_classes):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.convs = nn.ModuleList([SAGEConv(width, hidden), SAGEConv(hidden, num_classes)])

    def forward(self, x, edge_index):
        return self.convs[1](F.relu(self.convs[0](x, edge_index)), edge_index)


def make_ours(group, data, seeds):
    model = make_model("sage", data.num_features, HIDDEN, data.num_classes, 2)
    book = partition_graph(data.graph, group.size, balance=data.train_mask)
    options = {"features": data.features, "partition": book, "fanouts": FANOUTS, "seeds": seeds, "group": group}
    made = plan(data.graph, model, batch_size=BATCH_SIZE, num_epochs=20, **options)
    engine = Engine(made, model, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def run(epoch):
        for batch in engine.loader(seeds, data.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()

    return run, made.strategy


def make_pyg(group, data, seeds):
    from torch.nn.parallel import DistributedDataParallel
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    graph = Data(x=data.features, y=data.labels, edge_index=data.graph.edge_index())
    mine = seeds[group.rank :: group.size][: len(seeds) // group.size]
    loader = NeighborLoader(graph, FANOUTS, mine, batch_size=BATCH_SIZE // group.size, shuffle=True)
    torch.manual_seed(0)
    model = PygSage(data.num_features, HIDDEN, data.num_classes)
    model = DistributedDataParallel(model) if group.size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def run(epoch):
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(output, batch.y[: batch.batch_size]).backward()
            optimizer.step()

    return run


def time_on_rank(group, num_rounds):
    data = datasets.movielens()
    seeds = data.train_mask.nonzero().view(-1)
    ours, strategy = make_ours(group, data, seeds)
    runs = {"gnn-parallel": ours, "pyg": make_pyg(group, data, seeds)}
    wall, cpu = {name: [] for name in runs}, {name: [] for name in runs}
    for epoch in range(num_rounds + 1):
        for name, run in runs.items():
            group.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            run(epoch)
            took = torch.tensor([time.perf_counter() - start, time.process_time() - start_cpu], dtype=torch.float64)
            slowest, total = group.all_reduce(took, op="max"), group.all_reduce(took)
            if epoch:
                wall[name].append(float(slowest[0]))
                cpu[name].append(float(total[1]))
    return {"strategy": strategy, "wall": wall, "cpu": cpu}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not any(importlib.util.find_spec(name) for name in ("torch_sparse", "pyg_lib")):
        raise SystemExit("PyG's NeighborLoader needs torch-sparse or pyg-lib; install one of them to compare")
    found = launch.run_ranks(time_on_rank, args.ranks, args.rounds, threads=2 // args.ranks, timeout_seconds=120)[0]
    medians = {kind: {name: statistics.median(v) for name, v in found[kind].items()} for kind in ("wall", "cpu")}
    rows = [(n, f"{medians['wall'][n]:.3f} s", f"{medians['cpu'][n]:.3f} s") for n in medians["wall"]]
    ratios = {kind: m["gnn-parallel"] / m["pyg"] for kind, m in medians.items()}
    rows.append(("ratio", f"{ratios['wall']:.2f}", f"{ratios['cpu']:.2f}"))
    table(f"one epoch on {args.ranks} rank(s), strategy {found['strategy']}", ("", "wall", "CPU, all ranks"), rows)
    emit({"medians": medians, "ratios": ratios, "strategy": found["strategy"]}, args.json)


if __name__ == "__main__":
    main()
