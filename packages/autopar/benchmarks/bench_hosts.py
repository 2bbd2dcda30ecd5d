"""Predicted against measured step time on four hosts joined by slow links, and the choice against the usual schemes.

Four ranks in network namespaces with rate-limited links (needs root; see core_kernels.testing.ShapedHosts). Collectives
are measured on those links, and operators on the four ranks at once; then steps of plans spread over the frontier and
of the usual schemes are timed, plans interleaved, medians of the slowest rank. Models are sized so that links and not
the cores decide. ``torch ddp`` is torch's own DistributedDataParallel on the same links.

    python packages/autopar/benchmarks/bench_hosts.py --model vgg --json hosts.json      # about 2 minutes a model
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar import Cluster, Plan, apply, measure_operators, models, search, search_presets, trace
from autopar.graph import Graph
from core_kernels.comm import Group
from core_kernels.console import format_bytes, format_seconds, say, table
from core_kernels.testing import ShapedHosts

MESH = (4,)
MODELS: dict[str, Callable[[], Any]] = {
    "vgg": lambda: models.vgg16(image=32, classes=64, batch=128, shrink=8, hidden=1024),
    "gpt": lambda: models.gpt(layers=2, width=192, heads=6, vocabulary=512, length=64, batch=8),
    "mlp_mixer": lambda: models.mlp_mixer(blocks=2, width=192, image=32, patch=4, classes=64, batch=16),
    "wide_resnet": lambda: models.wide_resnet(depths=(1, 1), width=48, image=32, classes=64, batch=32),
}


@functools.cache
def make(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Graph]:
    """Return a model, its batch and its graph, the same on every rank."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model, batch, trace(model, batch)


def measure_links(group: Group, budget_seconds: float) -> Cluster:
    """Measure the collectives of four ranks. Collective: all ranks."""
    return replace(Cluster.measure(group, budget_seconds), launch_seconds=3e-5)


def measure_model(group: Group, name: str, cluster: Cluster) -> Cluster:
    """Measure a model's operators on all ranks at once. Collective: all ranks."""
    return measure_operators(make(name)[2], cluster, [MESH], repeats=5, group=group)


def time_plans(group: Group, name: str, plans: list[Plan], rounds: int) -> list[list[float]]:
    """Time steps of every plan and of torch's data parallelism, interleaved. Collective: all ranks."""
    model, batch, graph = make(name)
    steps: list[tuple[Callable[[], torch.Tensor], Any]] = []
    for plan in plans:
        parallel = apply(model, plan, graph, group)
        steps.append((functools.partial(parallel, *batch), torch.optim.AdamW(parallel.parameters(), lr=1e-4)))
    replica = torch.nn.parallel.DistributedDataParallel(MODELS[name]()[0])
    rows = [x.chunk(group.size)[group.rank] if x.shape[0] == batch[0].shape[0] else x for x in batch]
    steps.append((functools.partial(replica, *rows), torch.optim.AdamW(replica.parameters(), lr=1e-4)))
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds + 1):
        for number, (forward, optimizer) in enumerate(steps):
            group.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()
            if turn:
                times[number].append(time.perf_counter() - begin)
    return times


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation."""
    places = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def compare(hosts: ShapedHosts, name: str, cluster: Cluster, num_plans: int, rounds: int) -> dict[str, Any]:
    """Predict and time plans of one model, and return a row."""
    cluster = hosts.run(measure_model, name, cluster, deadline_seconds=120)[0]
    graph = make(name)[2]
    frontier = search(graph, cluster, [MESH])
    presets = search_presets(graph, cluster)
    places = np.unique(np.linspace(0, len(frontier) - 1, num_plans).round().astype(int))
    plans = [*(frontier[int(place)] for place in places), *presets.values()]
    ranks = hosts.run(time_plans, name, plans, rounds, deadline_seconds=280)
    *measured, ddp = [
        statistics.median(max(rank[number][turn] for rank in ranks) for turn in range(rounds))
        for number in range(len(plans) + 1)
    ]
    predicted = [plan.seconds for plan in plans]
    usual = dict(zip(presets, measured[len(places) :], strict=True))
    chosen = measured[len(places) - 1]  # the fastest by prediction
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {
        "model": name,
        "link_mbit": hosts.link_rate_mbit,
        "plans": len(plans),
        "rank_correlation": rank_correlation(predicted, measured),
        "mean_error": float(np.mean(errors)),
        "chosen_seconds": chosen,
        "presets": usual,
        "torch_ddp_seconds": ddp,
        "best_preset_over_chosen": min(usual.values()) / chosen,
        "points": [
            {"memory_bytes": plan.predicted.memory_bytes, "computing": plan.predicted.compute_seconds,
             "predicted": p, "measured": m, "messages": plan.predicted.messages}
            for plan, p, m in zip(plans, predicted, measured, strict=True)
        ],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """Print one model's table."""
    spread = row["plans"] - len(row["presets"])
    names = [*("frontier" for _ in range(spread)), *row["presets"]]
    shown = [
        (name, format_bytes(p["memory_bytes"]), *(format_seconds(p[k]) for k in ("computing", "predicted", "measured")))
        for name, p in zip(names, row["points"], strict=True)
    ]
    title = (
        f"{row['model']}: rank correlation {row['rank_correlation']:.3f}, mean error {row['mean_error']:.0%}, best of "
        f"{', '.join(row['presets'])} over chosen {row['best_preset_over_chosen']:.2f}, torch ddp over chosen "
        f"{row['torch_ddp_seconds'] / row['chosen_seconds']:.2f}"
    )
    table(title, ["plan", "memory per device", "of it computing", "predicted", "measured"], shown)


def main() -> None:
    """Measure and print a table per model; end with 1 when a figure falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated; all when left out")
    parser.add_argument("--link", type=float, default=100.0, help="megabit per second of each host (%(default)s)")
    parser.add_argument("--plans", type=int, default=24, help="plans of the frontier to time (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each plan (default %(default)s)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds to measure the links (%(default)s)")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ShapedHosts([1, 1, 1, 1], link_rate_mbit=args.link) as hosts:
        cluster = hosts.run(measure_links, args.budget, deadline_seconds=120)[0]
        for name in args.model or MODELS:
            rows.append(compare(hosts, name, cluster, args.plans, args.rounds))
            show(rows[-1])
            say(json.dumps({key: value for key, value in rows[-1].items() if key != "points"}))
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    short = [
        row["model"]
        for row in rows
        if row["rank_correlation"] < 0.9 or row["mean_error"] > 0.2 or row["best_preset_over_chosen"] < 0.97
    ]
    if short:
        raise SystemExit(f"short of the mark: {', '.join(short)}")


if __name__ == "__main__":
    main()
