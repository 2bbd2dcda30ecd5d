"""Features four times as large as the memory limit, runs killed and resumed, and some nodes asked for.

    python packages/gnn-eval/benchmarks/out_of_core.py [speed|resume|some] [--json FILE]

``speed``: 1M nodes, 10M edges, features of 512 floats (2 GB) in a control group of 512 MB that counts the page cache.
The baseline is a loop over ranges of destinations that indexes a ``numpy.memmap`` with the distinct sources and calls
the same kernels, also with the map told that access is random (``MADV_RANDOM``), which no reader of files does by
itself; as it would take many minutes, it is timed on some ranges taken evenly and scaled up. Bytes are ``read_bytes``
of ``/proc/self/io``, which leaves out what the page cache gave. Needs permission to make a control group, 6 GB of disk
and 5 to 10 minutes.

``resume``: a run of a smaller graph is killed at random instants again and again and resumed; its result is compared
byte by byte, and the rows computed after each kill are counted. About 2 minutes. ``some``: edges computed for 1 % of
the nodes against a closure counted with numpy. Without a word, all three.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limits import drop_from_cache, memory_group, read_bytes
from torch import nn

import gnn_eval
from core_kernels import Graph, ops
from core_kernels.console import CheckFailedError, CommandLine, format_bytes, say, table

LIMIT_BYTES = 512 << 20
NODES, EDGES, WIDTH, COMMUNITY = 1_000_000, 10_000_000, 512, 1000
RUN_MEMORY = "160MB"
BASELINE_ROWS = 4_000
BASELINE_RANGES = 6


class SumThenLinear(nn.Module):
    """Sums of raw neighbour rows, then a linear layer: the wide features themselves are gathered."""

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x, edge_index):
        for lin in self.lins:
            total = torch.zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])
            x = lin(x + total).relu()
        return x


def community_edges(num_nodes: int, num_edges: int, size: int, inside: float = 0.9, seed: int = 0) -> torch.Tensor:
    """Return edges of which a share stays inside communities, with node ids shuffled."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(num_nodes, (num_edges,), generator=generator)
    near = targets // size * size + torch.randint(size, (num_edges,), generator=generator)
    near = near.clamp(max=num_nodes - 1)
    far = torch.randint(num_nodes, (num_edges,), generator=generator)
    sources = torch.where(torch.rand(num_edges, generator=generator) < inside, near, far)
    return torch.randperm(num_nodes, generator=generator)[torch.stack([sources, targets])]


def write_features(path: Path, num_nodes: int, width: int) -> None:
    """Write random features a window at a time."""
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_nodes, width))
    rng = np.random.default_rng(0)
    for start in range(0, num_nodes, 50_000):
        stop = min(start + 50_000, num_nodes)
        rows[start:stop] = rng.standard_normal((stop - start, width), np.float32)
    rows.flush()


# Children, each in a process of its own.


def evaluate_stored(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a stored graph with the files between layers in a directory."""
    torch.manual_seed(0)
    model = SumThenLinear(tuple(args.widths)).eval()
    graph = gnn_eval.StoredGraph(args.graph)
    plan = gnn_eval.compile(model, graph.example(model))
    work = Path(args.work)
    before = read_bytes()
    print("start", flush=True)
    started = time.perf_counter()
    plan.run(
        graph,
        memory=args.memory,
        batch_rows=args.batch_rows,
        store=work,
        out=work.with_name("out.npy"),
        resume=args.resume,
    )
    report = plan.last_report
    return {
        "seconds": time.perf_counter() - started,
        "disk_bytes": read_bytes() - before,
        "asked_bytes": report.read_bytes,
        "rows": [stage.rows for stage in report.stages],
        "blocks": [stage.blocks for stage in report.stages],
        "reused_rows": sum(stage.reused_rows for stage in report.stages),
        "source_rows": report.source_rows,
        "predicted": [stage.predicted_peak_bytes for stage in report.stages],
        "measured": [stage.measured_peak_bytes for stage in report.stages],
        "held": report.held_bytes,
        "peak": report.peak_bytes,
    }


def loop_over_memmap(args: argparse.Namespace) -> dict[str, Any]:
    """Run the first layer by fancy indexing of a memory map, on some ranges; scale to all of them."""
    torch.manual_seed(0)
    model = SumThenLinear(tuple(args.widths)).eval()
    directory = Path(args.graph)
    x = np.load(directory / "x.npy", mmap_mode="r")
    if args.random:
        x._mmap.madvise(mmap.MADV_RANDOM)
    indptr, indices = np.load(directory / "indptr.npy"), np.load(directory / "indices.npy", mmap_mode="r")
    starts = np.arange(0, len(x), BASELINE_ROWS)
    chosen = starts[np.linspace(0, len(starts) - 1, BASELINE_RANGES).astype(int)]
    lin = model.lins[0]
    before, started = read_bytes(), time.perf_counter()
    with torch.inference_mode():
        for start in chosen:
            stop = min(start + BASELINE_ROWS, len(x))
            sources, local = np.unique(indices[indptr[start] : indptr[stop]], return_inverse=True)
            pointers = torch.from_numpy(indptr[start : stop + 1] - indptr[start])
            rows = torch.from_numpy(x[sources])
            block = Graph(pointers, torch.from_numpy(local), rows.size(0), validate=False)
            lin(torch.from_numpy(x[start:stop].copy()) + ops.spmm(block, rows)).relu()
    scale = len(starts) / len(chosen)
    return {
        "seconds": (time.perf_counter() - started) * scale,
        "disk_bytes": (read_bytes() - before) * scale,
        "ranges": len(chosen),
        "of_ranges": len(starts),
    }


def _child(name: str, result: Path, *arguments: object) -> list[str]:
    return [sys.executable, __file__, name, *map(str, arguments), "--json", str(result)]


# Measurements.


def speed(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        base = Path(place)
        features, edges = base / "x.npy", community_edges(NODES, EDGES, COMMUNITY)
        write_features(features, NODES, WIDTH)
        seconds = {}
        for order in ("natural", "cluster"):
            started = time.perf_counter()
            gnn_eval.convert({"x": features, "edge_index": edges}, base / order, order)
            seconds[order] = time.perf_counter() - started
        features.unlink()
        del edges
        found = {}
        runs = [
            ("memmap", "loop_over_memmap", "natural", []),
            ("memmap, told random", "loop_over_memmap", "natural", ["--random"]),
            ("memmap, cluster order", "loop_over_memmap", "cluster", ["--random"]),
            ("gnn-eval, cluster order", "evaluate_stored", "cluster", []),
        ]
        for name, kind, order, extra in runs:
            drop_from_cache(base)
            result = base / "result.json"
            command = _child(
                kind, result, base / order, base / "work", "--memory", RUN_MEMORY, "--widths", WIDTH, 64, *extra
            )
            with memory_group(LIMIT_BYTES) as group:
                if group.start(command, stdout=subprocess.DEVNULL).wait():
                    raise CheckFailedError(f"{name} failed under a limit of {format_bytes(LIMIT_BYTES)}")
            found[name] = json.loads(result.read_text())
            say(f"{name}: {found[name]}")
    ours = found["gnn-eval, cluster order"]
    rows = [
        [name, f"{f['seconds']:.1f} s", format_bytes(f["disk_bytes"]), f"{f['seconds'] / ours['seconds']:.1f}",
         f"{f['disk_bytes'] / ours['disk_bytes']:.1f}"]
        for name, f in found.items()
    ]  # fmt: skip
    title = f"features of {format_bytes(NODES * WIDTH * 4)} under a limit of {format_bytes(LIMIT_BYTES)}"
    table(title, ["", "time", "read from disk", "time ratio", "bytes ratio"], rows)
    say(f"written once: {seconds['natural']:.0f} s in the given order, {seconds['cluster']:.0f} s in cluster order")
    result = {"runs": found, "convert_seconds": seconds, "limit_bytes": LIMIT_BYTES}
    plain = found["memmap"]
    if plain["seconds"] < 2 * ours["seconds"] or plain["disk_bytes"] < 3 * ours["disk_bytes"]:
        raise CheckFailedError("less than 2 times as fast, or not 3 times fewer bytes", result)
    return result


def _small_graph(base: Path, order: str = "cluster") -> tuple[torch.Tensor, Path]:
    edges = community_edges(200_000, 2_000_000, 500)
    gnn_eval.convert({"x": torch.randn(200_000, 64), "edge_index": edges}, base / "graph", order)
    return edges, base / "graph"


def resume(args: argparse.Namespace) -> dict[str, Any]:
    chance, runs = random.Random(args.seed), []
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        base = Path(place)
        _, graph = _small_graph(base)
        settings = ["--batch-rows", 1000, "--widths", 64, 64, 64]
        whole = base / "whole"
        whole.mkdir()
        subprocess.run(
            _child("evaluate_stored", base / "r.json", graph, whole / "work", *settings),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        reference = json.loads((base / "r.json").read_text())
        total = sum(reference["rows"])
        cut = base / "cut"
        cut.mkdir()
        for kill in range(args.kills + 1):
            done = _done_rows(cut / "work")
            command = _child("evaluate_stored", base / "k.json", graph, cut / "work", *settings, "--resume")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                if kill < args.kills:
                    process.stdout.readline()
                    time.sleep(chance.random() * reference["seconds"] * 1.2 / args.kills)
                    process.kill()
                code = process.wait()
            finally:
                process.kill()
                process.communicate()
            if code == 0:
                computed = sum(json.loads((base / "k.json").read_text())["rows"])
                runs.append({"done_before": done, "computed": computed})
                break
            runs.append({"done_before": done, "computed": _done_rows(cut / "work") - done})
        same = (whole / "out.npy").read_bytes() == (cut / "out.npy").read_bytes()
    kills, computed = len(runs) - 1, sum(run["computed"] for run in runs)
    table(
        f"{kills} kills, {total:,} rows in all stages",
        ["run", "finished before", "finished in it"],
        [[str(n + 1), f"{r['done_before']:,}", f"{r['computed']:,}"] for n, r in enumerate(runs)],
    )
    say(f"rows finished in all runs together: {computed:,}; the same bytes: {same}")
    result = {"kills": kills, "runs": runs, "total_rows": total, "computed_rows": computed, "same_bytes": same}
    if not same or computed != total or kills == 0:
        raise CheckFailedError("other bytes, or finished rows were computed again, or nothing was killed", result)
    return result


def _done_rows(work: Path) -> int:
    record = work / "progress.json"
    return sum(json.loads(record.read_text())["done"].values()) if record.exists() else 0


def some(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = SumThenLinear((64, 64, 64)).eval()
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        base = Path(place)
        edges, directory = _small_graph(base)
        nodes = torch.randperm(200_000)[:2000]
        graph = gnn_eval.StoredGraph(directory)
        plan = gnn_eval.compile(model, graph.example(model))
        plan.run(graph, nodes=nodes, store=base / "work")
        found = plan.last_report.num_edges
    wanted, closure = np.zeros(200_000, bool), 0
    wanted[nodes.numpy()] = True
    sources, targets = edges.numpy()
    for _ in range(2):
        inside = wanted[targets]
        closure += int(inside.sum())
        wanted[sources[inside]] = True  # a row is read at its own node too
    table("2,000 of 200,000 nodes, two layers", ["", "edges"], [["computed", f"{found:,}"], ["closure", f"{closure:,}"],
          ["all nodes", f"{2 * edges.size(1):,}"]])  # fmt: skip
    result = {"computed_edges": found, "closure_edges": closure, "all_edges": 2 * edges.size(1)}
    if found != closure:
        raise CheckFailedError("the edges computed are not those of the closure", result)
    return result


def everything(args: argparse.Namespace) -> dict[str, Any]:
    return {"speed": speed(args), "resume": resume(args), "some": some(args)}


def main() -> int:
    cli = CommandLine("out_of_core", "Evaluation out of core.", gnn_eval.__version__, [OSError])
    kinds = {"speed": speed, "resume": resume, "some": some, "all": everything}
    for name, function in kinds.items():
        command = cli.command(name, function, f"measure {name}", f"out_of_core.py {name}")
        command.add_argument("--directory", help="where files go")
        command.add_argument("--kills", type=int, default=5)
        command.add_argument("--seed", type=int, default=0)
    children = {"evaluate_stored": evaluate_stored, "loop_over_memmap": loop_over_memmap}
    for name, function in children.items():
        command = cli.command(name, function, "one run", f"out_of_core.py {name} graph work")
        command.add_argument("graph")
        command.add_argument("work")
        command.add_argument("--memory")
        command.add_argument("--batch-rows", type=int)
        command.add_argument("--widths", type=int, nargs="+", required=True)
        command.add_argument("--resume", action="store_true")
        command.add_argument("--random", action="store_true")
    known = sys.argv[1:2] and sys.argv[1] in (*kinds, *children)
    return cli.run(sys.argv[1:] if known else ["all", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
