"""Draw the frontiers of four models with the usual schemes marked, and step time against the number of devices.

Predictions for a preset machine; nothing is run on it. Writes two SVG files and the page that shows them.

    python packages/autopar/benchmarks/figures.py docs/explanation      # about 1 minute
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from autopar import Cluster, fake_tensors, models, search, search_presets, trace
from autopar.errors import InfeasibleError
from core_kernels.console import format_bytes, format_seconds, say

MACHINE = "a100-8x8-ib"
COUNTS = (1, 2, 4, 8, 16, 32)
MODELS: dict[str, Callable[[], Any]] = {
    "RNN": lambda: models.lstm(layers=2, width=2048, vocabulary=32768, length=6, batch=256),
    "WideResNet": lambda: models.wide_resnet(widen=4, batch=64),
    "Transformer": lambda: models.gpt(6, 1024, 16, 50304, 512, 32),
    "VGG": lambda: models.vgg16(batch=64),
}
PAGE = """# autopar: frontiers of four models

Predicted for the preset `{machine}`; no step was run on such a machine. Repeat with
`python packages/autopar/benchmarks/figures.py docs/explanation`.

## Time against memory, 8 devices

Every step of a line is a plan that no other beats in both. Crosses are the fastest data-parallel, fully sharded and
tensor-parallel plans: what is above the line costs more time than it must at that memory.

![Step time over memory per device of four models on 8 devices](autopar-frontiers.svg)

{table}

## Time against the number of devices

The fastest plan within a fixed memory per device: four times the least that 8 devices need. Where a line begins, fewer
devices do not fit.

![Step time over number of devices at fixed memory](autopar-devices.svg)

{devices}
"""


def study(name: str, eps: float) -> dict[str, Any]:
    """Search one model on every number of devices."""
    with fake_tensors():
        model, inputs = MODELS[name]()
    graph = trace(model, inputs)
    cluster = Cluster.preset(MACHINE)
    frontier = search(graph, cluster.resized(8), eps=eps, max_levels=1)
    presets = search_presets(graph, cluster.resized(8), eps)
    budget = 4 * float(frontier.memory[0])
    by_count = {}
    for count in COUNTS:
        meshes = [(count,), (count // 2, 2)] if count > 2 else [(count,)]
        try:
            found = search(graph, cluster.resized(count), meshes, eps, max_levels=1)
            by_count[count] = float(found.mini_time(budget).seconds)
        except InfeasibleError:
            continue
    say(f"{name}: {len(frontier)} plans, {len(by_count)} of {len(COUNTS)} numbers of devices fit")
    return {
        "memory": frontier.memory.tolist(),
        "seconds": frontier.seconds.tolist(),
        "presets": {key: (plan.memory, plan.seconds) for key, plan in presets.items()},
        "budget": budget,
        "by_count": by_count,
    }


def draw(studies: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write both figures; equal numbers give equal files."""
    rcParams["svg.hashsalt"] = "autopar"
    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(2, 2).flat, studies.items(), strict=True):
        memory = [value / 2**30 for value in found["memory"]]
        axes.step(memory, [1e3 * value for value in found["seconds"]], where="post")
        for scheme, (held, seconds) in found["presets"].items():
            axes.plot(held / 2**30, 1e3 * seconds, "x", label=scheme)
        axes.set(title=name, xlabel="memory per device, GiB", ylabel="step, ms", xscale="log", yscale="log")
        axes.legend()
    figure.savefig(folder / "autopar-frontiers.svg", metadata={"Date": None})
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, found in studies.items():
        axes.plot(list(found["by_count"]), [1e3 * value for value in found["by_count"].values()], "o-", label=name)
    axes.set(xlabel="devices", ylabel="step, ms", xscale="log", yscale="log")
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.legend()
    figure.savefig(folder / "autopar-devices.svg", metadata={"Date": None})


def write_page(studies: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write the page with both figures and their numbers."""
    rows = [
        "| model | plans | least memory, its step | fastest step, its memory | usual schemes |",
        "|---|---:|---|---|---|",
    ]
    for name, found in studies.items():
        ends = [(found["memory"][i], found["seconds"][i]) for i in (0, -1)]
        usual = ", ".join(f"{s} {format_bytes(m)} {format_seconds(t)}" for s, (m, t) in found["presets"].items())
        low, fast = (f"{format_bytes(m)}, {format_seconds(t)}" for m, t in ends)
        fast = ", ".join(reversed(fast.split(", ")))
        rows.append(f"| {name} | {len(found['memory'])} | {low} | {fast} | {usual} |")
    devices = ["| model | memory each | " + " | ".join(map(str, COUNTS)) + " |", "|---|---:|" + "---:|" * len(COUNTS)]
    for name, found in studies.items():
        cells = [format_seconds(found["by_count"][c]) if c in found["by_count"] else "does not fit" for c in COUNTS]
        devices.append(f"| {name} | {format_bytes(found['budget'])} | " + " | ".join(cells) + " |")
    page = PAGE.format(machine=MACHINE, table="\n".join(rows), devices="\n".join(devices))
    (folder / "autopar-frontiers.md").write_text(page)


def main() -> None:
    """Search, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the page and its figures go")
    parser.add_argument("--eps", type=float, default=0.05, help="share of memory given up (default %(default)s)")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args()
    studies = {name: study(name, args.eps) for name in MODELS}
    draw(studies, args.folder)
    write_page(studies, args.folder)
    if args.json:
        Path(args.json).write_text(json.dumps(studies, indent=1) + "\n")


if __name__ == "__main__":
    main()
