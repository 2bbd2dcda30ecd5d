"""Time of layer-wise evaluation against PyTorch Geometric, interleaved in one process.

    python packages/gnn-eval/benchmarks/speed.py [--nodes 50000] [--edges 750000] [--rounds 5]

Baselines: PyG's full forward; PyG's own layer-wise loop (a one-hop block per 2,000 nodes and layer, the form of its
examples, blocks built beforehand and not counted); node-wise evaluation (the full receptive field of 500 nodes at a
time, some batches timed and scaled up). CPU time is compared, since it is what a shared machine can tell.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as gnn

import gnn_eval
from core_kernels.console import CommandLine, table

BATCH = 2000


def power_law_graph(num_nodes: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    weights = (np.arange(num_nodes) + 10.0) ** -0.4
    order = rng.permutation(num_nodes)
    sources = order[rng.choice(num_nodes, num_edges, p=weights / weights.sum())]
    return torch.from_numpy(np.stack([sources, rng.integers(num_nodes, size=num_edges)]))


class LayerwiseLoop:
    """PyG's layer-wise loop: for each layer, for each block, one convolution on a one-hop subgraph."""

    def __init__(self, model: Any, edge_index: torch.Tensor, num_nodes: int):
        self.model, self.num_nodes, self.blocks = model, num_nodes, []
        order = edge_index[1].argsort(stable=True)
        sources, targets = edge_index[0][order], edge_index[1][order]
        pointers = torch.searchsorted(targets, torch.arange(0, num_nodes + BATCH, BATCH).clamp(max=num_nodes))
        for place, start in enumerate(range(0, num_nodes, BATCH)):
            stop = min(start + BATCH, num_nodes)
            inside = slice(int(pointers[place]), int(pointers[place + 1]))
            seeds = torch.arange(start, stop)
            others, _ = torch.unique(sources[inside]), None
            others = others[(others < start) | (others >= stop)]
            ids = torch.cat([seeds, others])
            number = torch.empty(num_nodes, dtype=torch.int64)
            number[ids] = torch.arange(ids.numel())
            self.blocks.append((ids, torch.stack([number[sources[inside]], targets[inside] - start]), stop - start))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer, conv in enumerate(self.model.convs):
                outs = []
                for ids, edges, size in self.blocks:
                    h = conv(x[ids], edges)[:size]
                    outs.append(h.relu() if layer + 1 < len(self.model.convs) else h)
                x = torch.cat(outs)
        return x


def nodewise_seconds(model: Any, x: torch.Tensor, edge_index: torch.Tensor, batches: int = 2, size: int = 500) -> float:
    """Return CPU seconds of node-wise evaluation of all nodes, from some batches of full receptive fields."""
    from torch_geometric.utils import k_hop_subgraph

    generator = torch.Generator().manual_seed(0)
    started = time.process_time()
    for _ in range(batches):
        seeds = torch.randint(x.size(0), (size,), generator=generator).unique()
        ids, edges, places, _ = k_hop_subgraph(seeds, 3, edge_index, relabel_nodes=True, num_nodes=x.size(0))
        with torch.no_grad():
            model(x[ids], edges)[places]
    return (time.process_time() - started) / batches * (x.size(0) / size)


def median_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each call, rounds interleaved after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.process_time()
            call()
            if number:
                times[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(args.nodes, 128)
    edge_index = power_law_graph(args.nodes, args.edges)
    extra = {"heads": 4} if kind == "GAT" else {}
    model = getattr(gnn, kind)(128, 128, 3, out_channels=47 if kind == "GraphSAGE" else 48, **extra).eval()
    plan = gnn_eval.compile(model, (x, edge_index))
    loop = LayerwiseLoop(model, edge_index, args.nodes)
    data = (x, edge_index)
    calls = {"pyg full": lambda: _full(model, x, edge_index)}
    if kind != "GCN":
        calls["pyg loop 2000"] = lambda: loop(x)
    calls |= {
        "one block, unfused": lambda: plan.run(data, batch_rows=args.nodes, fuse=False),
        "one block, fused": lambda: plan.run(data, batch_rows=args.nodes, fuse=True),
        "blocks of 2000, unfused": lambda: plan.run(data, batch_rows=BATCH, fuse=False),
        "blocks of 2000, fused": lambda: plan.run(data, batch_rows=BATCH, fuse=True),
        "default": lambda: plan.run(data),
    }
    seconds = median_times(calls, args.rounds)
    if args.nodewise:
        seconds["node-wise 500"] = nodewise_seconds(model, x, edge_index)
    return seconds


def _full(model: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x, edge_index)


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"nodes": args.nodes, "edges": args.edges, "threads": torch.get_num_threads()}
    for kind in args.models.split(","):
        seconds = measure(kind, args)
        full, loop = seconds["pyg full"], seconds.get("pyg loop 2000", float("nan"))
        rows = [[n, f"{s * 1e3:.0f} ms", f"{s / full:.3f}", f"{s / loop:.3f}"] for n, s in seconds.items()]
        table(f"{kind}, 3 layers", ["", "CPU time", "of PyG full", "of PyG loop"], rows)
        result[kind] = seconds
    return result


def main() -> int:
    cli = CommandLine("speed", "Layer-wise evaluation against PyTorch Geometric.", gnn_eval.__version__)
    command = cli.command("run", run, "measure", "speed.py")
    command.add_argument("--nodes", type=int, default=50_000)
    command.add_argument("--edges", type=int, default=750_000)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--models", default="GraphSAGE,GAT")
    command.add_argument("--nodewise", action="store_true", help="also time node-wise evaluation")
    return cli.run(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
