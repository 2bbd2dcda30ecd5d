"""A graph of 10M nodes and 100M edges, width 64, two layers, out of core under a limit of 2 GB.

    python packages/gnn-eval/benchmarks/scale.py [--nodes 10000000] [--edges 100000000] [--json FILE]

The graph is made here, a window of destinations at a time and written as it is made: 90 % of the sources in a community
of 1,000 nodes, 9 % within 50,000 ids, 1 % anywhere. The run is a process of its own in a control group of 2 GB that
counts the page cache too; where none can be made, it is ended once its resident memory passes 2 GB. The run shows its
progress with the time left on a terminal. What was predicted is printed beside what was measured. Needs 8 GB of disk,
all of it freed at the end, and some 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limits import MemoryGroup, drop_from_cache, memory_group, read_bytes
from torch import nn

import gnn_eval
from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, say, table
from gnn_eval.disk_rows import DiskRows
from gnn_eval.estimate import estimate_stages, measure_rates, sample_source_share

WIDTH, COMMUNITY, NEAR, WINDOW = 64, 1000, 50_000, 200_000
LIMIT_BYTES = 2 << 30


class Layers(nn.Module):
    """Mean of the neighbours plus the node's own row, a linear layer, a rectifier."""

    def __init__(self, num_layers: int = 2):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        degree = torch.zeros(x.size(0)).index_add(0, target, torch.ones(target.size(0))).clamp(min=1).unsqueeze(1)
        for lin in self.lins:
            x = lin(x + torch.zeros(x.size(0), x.size(1)).index_add(0, target, x[source]) / degree).relu()
        return x


def write_graph(directory: Path, num_nodes: int, num_edges: int, seed: int = 0) -> None:
    """Write a stored graph in bounded memory, exact in both counts."""
    directory.mkdir()
    rng = np.random.default_rng(seed)
    base, extra = divmod(num_edges, num_nodes)
    degrees = np.full(num_nodes, base, np.int64)
    degrees[:extra] += 1
    pairs = degrees[: num_nodes // 2 * 2].reshape(-1, 2)
    shifted = rng.integers(0, base + 1, len(pairs))
    pairs += np.stack([shifted, -shifted], 1)  # in-degrees from 0 to twice the mean
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(degrees, out=indptr[1:])
    np.save(directory / "indptr.npy", indptr)
    x = DiskRows.create(directory / "x.npy", (num_nodes, WIDTH), torch.float32)
    indices = DiskRows.create(directory / "indices.npy", (num_edges,), torch.int32)
    for start in range(0, num_nodes, WINDOW):
        stop = min(start + WINDOW, num_nodes)
        targets = np.repeat(np.arange(start, stop), degrees[start:stop])
        kind = rng.random(targets.size, np.float32)
        sources = targets // COMMUNITY * COMMUNITY + rng.integers(0, COMMUNITY, targets.size)
        near = targets + rng.integers(-NEAR, NEAR, targets.size)
        sources = np.where(kind < 0.9, sources, near) % num_nodes
        sources = np.where(kind < 0.99, sources, rng.integers(0, num_nodes, targets.size))
        indices.write_range(int(indptr[start]), torch.from_numpy(sources.astype(np.int32)))
        x.write_range(start, torch.from_numpy(rng.standard_normal((stop - start, WIDTH), np.float32)))
    manifest = {"schema": "gnn-eval-graph", "version": 1, "num_nodes": num_nodes, "num_edges": num_edges}
    (directory / "manifest.json").write_text(json.dumps(manifest | {"node_inputs": ["x"], "edge_inputs": []}))


def evaluate_stored(args: argparse.Namespace) -> dict[str, Any]:
    """The run itself, in a process of its own."""
    torch.manual_seed(0)
    model, graph, work = Layers().eval(), gnn_eval.StoredGraph(args.graph), Path(args.work)
    plan = gnn_eval.compile(model, graph.example(model))
    counts = {"n_node": graph.num_nodes, "e_edge_index": graph.num_edges}
    rates, share = measure_rates(work), sample_source_share(graph)
    predicted = estimate_stages(plan.compiled, counts, args.memory << 20, rates, share)
    before, started = read_bytes(), time.perf_counter()
    plan.run(graph, memory=args.memory << 20, store=work / "work", out=work / "out.npy", progress=True)
    seconds, report = time.perf_counter() - started, plan.last_report
    return {
        "seconds": seconds,
        "edges_per_second": report.num_edges / seconds,
        "disk_bytes": read_bytes() - before,
        "peak_bytes": report.peak_bytes,
        "source_share": share,
        "rates": vars(rates),
        "stages": [vars(stage) for stage in report.stages],
        "predicted": [stage.to_json() for stage in predicted],
    }


@contextmanager
def maybe_group() -> Iterator[MemoryGroup | None]:
    """Yield a control group of 2 GB, or ``None`` where none can be made."""
    try:
        with memory_group(LIMIT_BYTES) as group:
            yield group
    except PermissionError:
        yield None


def watched(command: list[str]) -> int:
    """Run a command in the control group, else under a watch; return its highest resident memory."""
    with maybe_group() as group:
        process = subprocess.Popen(command) if group is None else group.start(command)
        highest = 0
        while process.poll() is None:
            try:
                highest = max(highest, int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096)
            except (OSError, IndexError):
                break
            if group is None and highest > LIMIT_BYTES:
                process.kill()
            time.sleep(0.02)
        if process.wait():
            raise CheckFailedError(f"the run ended with exit code {process.returncode}, memory {format_bytes(highest)}")
    return highest


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        base = Path(place)
        started = time.perf_counter()
        write_graph(base / "graph", args.nodes, args.edges)
        made_seconds = time.perf_counter() - started
        say(f"graph of {args.nodes:,} nodes and {args.edges:,} edges written in {format_seconds(made_seconds)}")
        drop_from_cache(base)
        arguments = [str(base / "graph"), place, "--memory", str(args.memory), "--json", str(base / "result.json")]
        highest = watched([sys.executable, __file__, "evaluate_stored", *arguments])
        result = json.loads((base / "result.json").read_text()) | {"made_seconds": made_seconds, "resident": highest}
    rows = [
        [str(s["level"]), f"{s['blocks']}", f"{p['blocks']}",
         format_bytes(s["read_bytes"]), format_bytes(p["read_bytes"]),
         format_bytes(s["written_bytes"]), format_bytes(p["written_bytes"]), f"{s['seconds']:.1f} s",
         f"{p['seconds']:.1f} s"]
        for s, p in zip(result["stages"], result["predicted"], strict=True)
    ]  # fmt: skip
    title = f"{args.nodes:,} nodes, {args.edges:,} edges, budget {args.memory} MiB, limit {format_bytes(LIMIT_BYTES)}"
    table(
        title, ["stage", "blocks", "predicted", "read", "predicted", "written", "predicted", "time", "predicted"], rows
    )
    say(
        f"{format_seconds(result['seconds'])} in all, {result['edges_per_second'] / 1e6:.2f}M edges per second, "
        f"allocated {format_bytes(result['peak_bytes'])}, resident {format_bytes(highest)}, "
        f"read from disk {format_bytes(result['disk_bytes'])}"
    )
    if highest > LIMIT_BYTES:
        raise CheckFailedError(f"resident memory of {format_bytes(highest)} passed the limit", result)
    return result


def main() -> int:
    cli = CommandLine("scale", "A large graph out of core.", gnn_eval.__version__, [OSError])
    command = cli.command("run", run, "measure", "scale.py")
    command.add_argument("--nodes", type=int, default=10_000_000)
    command.add_argument("--edges", type=int, default=100_000_000)
    command.add_argument("--directory", help="where files go")
    child = cli.command("evaluate_stored", evaluate_stored, "the run itself", "scale.py evaluate_stored graph work")
    child.add_argument("graph")
    child.add_argument("work")
    for parser in (command, child):
        parser.add_argument("--memory", type=int, default=1200, help="budget in MiB")
    return cli.run(sys.argv[1:] if sys.argv[1:2] == ["evaluate_stored"] else ["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
