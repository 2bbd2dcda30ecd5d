"""One layer, forward and backward, beside PyTorch Geometric: CPU time and added memory.

    python benchmarks/bench_layers.py --nodes 50000 --edges 1000000 --width 128

About two minutes. Column dx: whether the gradient of the input is wanted too, as in a hidden layer. Times are process
CPU seconds of one thread, medians of interleaved runs in this process. Added memory is the growth of peak RSS over
one step, each in a process of its own that has run the layer on a small graph before.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore", module="torch_geometric")
LAYERS = ("gcn", "sage", "sage-max", "gin", "gat", "gatv2")
#: Time and memory of PyG over ours that each layer is to reach on the default graph.
GOALS = {"gcn": (12.0, None), "sage": (5.0, None), "gat": (4.0, 8.0)}


def make_graph(num_nodes: int, num_edges: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


def make_layer(library: str, name: str, width: int) -> torch.nn.Module:
    if library == "pyg":
        import torch_geometric.nn as layers
    else:
        import core_kernels.nn as layers
    torch.manual_seed(0)
    return {
        "gcn": lambda: layers.GCNConv(width, width),
        "sage": lambda: layers.SAGEConv(width, width),
        "sage-max": lambda: layers.SAGEConv(width, width, aggr="max"),
        "gin": lambda: layers.GINConv(torch.nn.Linear(width, width)),
        "gat": lambda: layers.GATConv(width, width // 4, heads=4),
        "gatv2": lambda: layers.GATv2Conv(width, width // 4, heads=4),
    }[name]()


def make_step(library: str, name: str, width: int, edge_index: torch.Tensor, num_nodes: int, input_grad: bool):
    layer = make_layer(library, name, width)
    x = torch.randn(num_nodes, width, requires_grad=input_grad)
    grad = torch.randn(num_nodes, width)
    if library == "pyg":
        arguments = (x, edge_index)
    else:
        from core_kernels import Graph

        arguments = (Graph.from_edge_index(edge_index, num_nodes), x)

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(*arguments).backward(grad)

    return step


def measure_memory(library: str, name: str, arguments: argparse.Namespace, input_grad: bool) -> float:
    """Return the MB a step adds to the peak RSS of a fresh process."""
    command = [sys.executable, __file__, "--child", library, name, "--nodes", str(arguments.nodes)]
    command += ["--edges", str(arguments.edges), "--width", str(arguments.width)]
    command += ["--input-grad", "yes" if input_grad else "no"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_child(arguments: argparse.Namespace) -> None:
    library, name = arguments.child
    input_grad = arguments.input_grad == "yes"
    small = make_step(library, name, arguments.width, make_graph(100, 1000), 100, input_grad)
    small()
    edges = make_graph(arguments.nodes, arguments.edges)
    step = make_step(library, name, arguments.width, edges, arguments.nodes, input_grad)
    # Writing 5 makes the kernel forget the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = read_peak_kb()
    step()
    print((read_peak_kb() - before) / 1024)


def read_peak_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1))


def measure_seconds(steps: dict[str, object], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each step, run in turns."""
    samples: dict[str, list[float]] = {key: [] for key in steps}
    for repeat in range(repeats + 1):
        for key, step in steps.items():
            start = time.process_time()
            step()
            if repeat:
                samples[key].append(time.process_time() - start)
    return {key: statistics.median(values) for key, values in samples.items()}


def compare(name: str, edge_index: torch.Tensor, arguments: argparse.Namespace, input_grad: bool) -> dict:
    """Return seconds and MB of one layer in both libraries."""
    steps = {
        library: make_step(library, name, arguments.width, edge_index, arguments.nodes, input_grad)
        for library in ("ours", "pyg")
    }
    seconds = measure_seconds(steps, arguments.repeats)
    row = {"layer": name, "input_grad": input_grad, **{f"{key}_seconds": value for key, value in seconds.items()}}
    del steps
    if not arguments.no_memory:
        row |= {f"{library}_mb": measure_memory(library, name, arguments, input_grad) for library in ("ours", "pyg")}
    return row


def format_row(row: dict) -> str:
    """Return the line of a layer, with its goals and whether they hold."""
    ours, pyg = row["ours_seconds"] * 1e3, row["pyg_seconds"] * 1e3
    ratios = [pyg / ours]
    text = f"{row['layer']:10}{'yes' if row['input_grad'] else 'no':>4}{ours:9.1f}{pyg:9.1f}{ratios[0]:8.2f}"
    if "ours_mb" in row:
        ratios.append(row["pyg_mb"] / max(row["ours_mb"], 1e-9))
        text += f"{row['ours_mb']:9.0f}{row['pyg_mb']:9.0f}{ratios[1]:8.2f}"
    for word, goal, ratio in zip(("time", "memory"), GOALS.get(row["layer"], ()), ratios, strict=False):
        if goal is not None:
            text += f"  {word} >= {goal:g}x {'holds' if ratio >= goal else 'FALLS SHORT'}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", nargs="+", default=["gcn", "sage", "gat"], choices=LAYERS)
    parser.add_argument(
        "--input-grad",
        choices=("no", "yes", "both"),
        default="both",
        help="want the gradient of x too, as a hidden layer does",
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        run_child(arguments)
        return
    edge_index = make_graph(arguments.nodes, arguments.edges)
    rows = []
    print(
        f"{'layer':10}{'dx':>4}{'ms':>9}{'PyG ms':>9}{'ratio':>8}{'MB':>9}{'PyG MB':>9}{'ratio':>8}  goal and verdict"
    )
    for input_grad in {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.input_grad]:
        for name in arguments.layers:
            rows.append(compare(name, edge_index, arguments, input_grad))
            print(format_row(rows[-1]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
