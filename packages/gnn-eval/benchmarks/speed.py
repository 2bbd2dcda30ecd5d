"""Time of layer-wise evaluation against PyTorch Geometric, interleaved in one process; about 3 minutes of CPU time.

    python packages/gnn-eval/benchmarks/speed.py [--nodes 50000] [--edges 750000] [--rounds 5] [--json [FILE]]

Baselines: PyG's full forward; PyG's own layer-wise loop (a one-hop block per 2,000 nodes and layer, the form of its
examples; blocks are built beforehand and not counted, which favours it); node-wise evaluation with ``NeighborLoader``,
all neighbours of all hops for 500 nodes at a time, as many random batches as ``--batches`` says timed and scaled up to
all nodes. CPU time is compared, since it is what a shared machine can tell. Exit code 1 if a ratio misses its limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as gnn

import gnn_eval
from core_kernels.console import CheckFailedError, CommandLine, table

BATCH = 2000
SEEDS = 500
LAYERS = 3
COMPILES = ("compile", "compile again")
COMPILE_LIMIT_SECONDS = 5.0


@dataclass(frozen=True)
class Limit:
    """A ratio of two times that must not exceed, or must reach, a value."""

    text: str
    over: str
    under: str
    bound: float
    at_least: bool = False

    def holds(self, seconds: dict[str, float]) -> bool:
        ratio = self.ratio(seconds)
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def ratio(self, seconds: dict[str, float]) -> float:
        return seconds[self.over] / seconds[self.under]


LIMITS = (
    Limit("times faster than node-wise", "node-wise", "default", 35, at_least=True),
    Limit("blocks of 2,000, fused, over PyG's loop", "blocks of 2000, fused", "pyg loop 2000", 0.35),
    Limit("blocks of 2,000, unfused, over PyG's loop", "blocks of 2000, unfused", "pyg loop 2000", 1.05),
    Limit("one block, unfused, over PyG's full forward", "one block, unfused", "pyg full", 1.10),
    Limit("one block, fused, over PyG's full forward", "one block, fused", "pyg full", 0.22),
)


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
            others = torch.unique(sources[inside])
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


def nodewise_seconds(model: Any, x: torch.Tensor, edge_index: torch.Tensor, batches: int) -> float:
    """Return CPU seconds of node-wise evaluation of all nodes, scaled up from some random batches."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    seeds = torch.randperm(x.size(0), generator=torch.Generator().manual_seed(0))[: batches * SEEDS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = NeighborLoader(Data(x=x, edge_index=edge_index), [-1] * LAYERS, seeds, batch_size=SEEDS)
        started = time.process_time()
        with torch.no_grad():
            for batch in loader:
                model(batch.x, batch.edge_index)[: batch.batch_size]
    return (time.process_time() - started) / seeds.numel() * x.size(0)


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
    """Return CPU seconds by name, and those of compiling the model for the first and the second time."""
    torch.manual_seed(0)
    x = torch.randn(args.nodes, 128)
    edge_index = power_law_graph(args.nodes, args.edges)
    extra = {"heads": 4} if kind == "GAT" else {}
    model = getattr(gnn, kind)(128, 128, LAYERS, out_channels=47 if kind == "GraphSAGE" else 48, **extra).eval()
    data = (x, edge_index)
    compile_seconds = []
    for _ in range(2):
        started = time.process_time()
        plan = gnn_eval.compile(model, data)
        compile_seconds.append(time.process_time() - started)
    loop = LayerwiseLoop(model, edge_index, args.nodes)
    calls = {
        "pyg full": lambda: _full(model, x, edge_index),
        "pyg loop 2000": lambda: loop(x),
        "one block, unfused": lambda: plan.run(data, batch_rows=args.nodes, fuse=False),
        "one block, fused": lambda: plan.run(data, batch_rows=args.nodes, fuse=True),
        "blocks of 2000, unfused": lambda: plan.run(data, batch_rows=BATCH, fuse=False),
        "blocks of 2000, fused": lambda: plan.run(data, batch_rows=BATCH, fuse=True),
        "default": lambda: plan.run(data),
    }
    seconds = median_times(calls, args.rounds)
    seconds["node-wise"] = nodewise_seconds(model, x, edge_index, args.batches)
    return seconds | dict(zip(COMPILES, compile_seconds, strict=True))


def _full(model: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x, edge_index)


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"nodes": args.nodes, "edges": args.edges, "threads": torch.get_num_threads()}
    result |= {"rounds": args.rounds, "node-wise batches": args.batches}
    missed = []
    for kind in args.models.split(","):
        seconds = measure(kind, args)
        full, loop = seconds["pyg full"], seconds["pyg loop 2000"]
        timed = {name: value for name, value in seconds.items() if name not in COMPILES}
        rows = [[n, f"{s * 1e3:,.0f} ms", f"{s / full:.3f}", f"{s / loop:.3f}"] for n, s in timed.items()]
        table(f"{kind}, {LAYERS} layers", ["", "CPU time", "of PyG full", "of PyG loop"], rows)
        lines = []
        for limit in LIMITS:
            sign = "at least" if limit.at_least else "at most"
            lines.append([limit.text, f"{limit.ratio(seconds):.3f}", f"{sign} {limit.bound:g}"])
            missed += [] if limit.holds(seconds) else [f"{kind}: {limit.text}"]
        lines.append(["seconds to compile", f"{seconds['compile']:.2f}", f"at most {COMPILE_LIMIT_SECONDS:g}"])
        lines.append(["seconds to compile again", f"{seconds['compile again']:.4f}", "the plan is reused"])
        missed += [f"{kind}: compile"] if seconds["compile"] > COMPILE_LIMIT_SECONDS else []
        table(f"{kind}: limits", ["", "measured", "limit"], lines)
        result[kind] = seconds | {limit.text: limit.ratio(seconds) for limit in LIMITS}
    if missed:
        raise CheckFailedError(f"limits missed: {'; '.join(missed)}", result)
    return result


def main() -> int:
    cli = CommandLine("speed", "Layer-wise evaluation against PyTorch Geometric.", gnn_eval.__version__)
    command = cli.command("run", run, "measure", "speed.py")
    command.add_argument("--nodes", type=int, default=50_000)
    command.add_argument("--edges", type=int, default=750_000)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--models", default="GraphSAGE,GAT")
    command.add_argument("--batches", type=int, default=2, help="random batches of 500 nodes timed for node-wise")
    return cli.run(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
