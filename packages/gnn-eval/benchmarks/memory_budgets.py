"""Allocated memory of runs under budgets from 256 MB to 4 GB, in processes of their own.

    python packages/gnn-eval/benchmarks/memory_budgets.py [--budgets 256,512,1024,2048,4096] [--json FILE]

The budget bounds the rise of the process's own memory above that before the run: blocks, what is held between stages,
edges sorted by destination, the result; pages of mapped files do not count. It is measured from outside: this process
reads the resident memory of the child, less its pages of files, every two milliseconds. Two workloads: ``ram``, two
layers of width 128 without fused kernels on a graph in memory, whose full forward needs more than 8 GB; and ``disk``,
fused layers of width 128 with features and intermediate values on disk. Takes about 5 minutes, 10 on a busy
machine, and 8 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gnn_eval
from core_kernels.console import CheckFailedError, CommandLine, say, table

WIDTH = 128
WORKLOADS = {"ram": (60_000, 14_000_000), "disk": (4_000_000, 16_000_000)}


class Layers(nn.Module):
    """Sums of neighbours with a linear layer each, in plain torch."""

    def __init__(self, num_layers: int = 2):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x, edge_index):
        for lin in self.lins:
            total = torch.zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])
            x = lin(x + total).relu()
        return x


def local_edges(num_nodes: int, num_edges: int, spread: int = 5000) -> torch.Tensor:
    """Return edges whose ends are at most ``spread`` apart, grouped by destination."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(num_nodes, (num_edges,), generator=generator).sort().values
    sources = (targets + torch.randint(-spread, spread, (num_edges,), generator=generator)) % num_nodes
    return torch.stack([sources, targets])


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Run one workload; say when it starts and ends, so that the parent knows what to measure."""
    torch.manual_seed(0)
    num_nodes, num_edges = WORKLOADS[args.workload]
    model = Layers().eval()
    small = (torch.randn(2000, WIDTH), local_edges(2000, 8000, 100))
    plan = gnn_eval.compile(model, small)
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        work = Path(place)
        if args.workload == "disk":
            data: Any = gnn_eval.StoredGraph(args.graph)
            options: dict[str, Any] = {"store": work / "work", "out": work / "out.npy"}
            warm: Any = gnn_eval.convert({"x": small[0], "edge_index": small[1]}, work / "small")
        else:
            data = (torch.randn(num_nodes, WIDTH), local_edges(num_nodes, num_edges))
            options, warm = {"fuse": False}, small
        plan.run(warm, memory="256MB", **options)  # libraries are loaded and kernels compiled by now
        print("start", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        plan.run(data, memory=args.budget * 2**20, **options)
        seconds = time.perf_counter() - started
        print("end", flush=True)
        sys.stdin.readline()
    report = plan.last_report
    return {
        "seconds": seconds,
        "own_peak": report.peak_bytes,
        "blocks": [stage.blocks for stage in report.stages],
        "predicted": [stage.predicted_peak_bytes for stage in report.stages],
        "measured": [stage.measured_peak_bytes for stage in report.stages],
    }


class Watch:
    """Reads the allocated memory of another process again and again, on a thread."""

    def __init__(self, process: int):
        self._file, self._stops = Path(f"/proc/{process}/statm"), False
        self.start = self.highest = self._read()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _read(self) -> int:
        _, resident, of_files, *_ = map(int, self._file.read_text().split())
        return (resident - of_files) * 4096

    def _run(self) -> None:
        while not self._stops:
            self.highest = max(self.highest, self._read())
            time.sleep(0.002)

    def stop(self) -> int:
        """Return the highest rise seen."""
        self._stops = True
        self._thread.join()
        return self.highest - self.start


def watched(workload: str, budget: int, directory: str, graph: str) -> dict[str, Any]:
    """Run one workload in a child process; return its report with the peak seen from outside."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, __file__, "child", workload, str(budget), directory, graph, "--json", result.name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            _wait_for(process, "start")
            watch = Watch(process.pid)
            try:
                print("go", file=process.stdin, flush=True)
                _wait_for(process, "end")
            finally:
                peak = watch.stop()
            process.communicate("go\n")
        finally:
            process.kill()
            process.wait()
        return {
            "workload": workload,
            "budget": budget * 2**20,
            "peak": peak,
            **json.loads(Path(result.name).read_text()),
        }


def _wait_for(process: subprocess.Popen, word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise CheckFailedError(f"a run ended with exit code {process.wait()} before {word!r}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        graph = str(Path(place) / "graph")
        if "disk" in args.workloads:
            write_graph(graph, *WORKLOADS["disk"])
        for workload in args.workloads.split(","):
            for budget in map(int, args.budgets.split(",")):
                found.append(watched(workload, budget, place, graph))
                say(f"{workload}, {budget} MiB: peak {found[-1]['peak'] / found[-1]['budget']:.2f} of the budget")
    rows = [
        [f"{f['workload']}, {f['budget'] >> 20} MiB", f"{f['peak'] / 2**20:.0f} MiB", f"{f['peak'] / f['budget']:.2f}",
         f"{f['own_peak'] / f['budget']:.2f}", f"{max(f['predicted']) / 2**20:.0f} MiB",
         f"{max(f['measured']) / 2**20:.0f} MiB",
         "+".join(map(str, f["blocks"])), f"{f['seconds']:.1f} s"]
        for f in found
    ]  # fmt: skip
    table(
        "allocated memory above the start of the run",
        ["budget", "peak", "of budget", "as reported", "block, predicted", "block, measured", "blocks", "time"],
        rows,
    )
    worst = [f for f in found if not 0.8 <= f["peak"] / f["budget"] <= 1.0]
    if worst:
        raise CheckFailedError(f"{len(worst)} peaks are outside 0.8 to 1.0 of their budget", {"runs": found})
    return {"runs": found}


def write_graph(directory: str, num_nodes: int, num_edges: int) -> None:
    """Write a stored graph whose features are made a window at a time."""
    path = Path(directory).with_name("x.npy")
    x = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_nodes, WIDTH))
    rng = np.random.default_rng(0)
    for start in range(0, num_nodes, 100_000):
        x[start : start + 100_000] = rng.standard_normal((min(100_000, num_nodes - start), WIDTH), np.float32)
    x.flush()
    del x
    gnn_eval.convert({"x": path, "edge_index": local_edges(num_nodes, num_edges)}, directory)
    path.unlink()


def main() -> int:
    cli = CommandLine("memory_budgets", "Allocated memory under budgets.", gnn_eval.__version__)
    command = cli.command("run", run, "measure", "memory_budgets.py")
    command.add_argument("--budgets", default="256,512,1024,2048,4096", help="MiB")
    command.add_argument("--workloads", default="ram,disk")
    command.add_argument(
        "--directory", default=None, help="where files go; the system's temporary directory if not given"
    )
    one = cli.command("child", child, "run one workload", "memory_budgets.py child ram 256 /tmp graph")
    one.add_argument("workload", choices=WORKLOADS)
    one.add_argument("budget", type=int)
    one.add_argument("directory")
    one.add_argument("graph")
    return cli.run(sys.argv[1:] if sys.argv[1:2] == ["child"] else ["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
