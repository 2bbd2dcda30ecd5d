"""Predicted against measured step time on four hosts joined by slow links, and the choice against the usual schemes.

Four ranks in network namespaces with rate-limited links (needs root; see core_kernels.testing.ShapedHosts). Collectives
are measured on those links and operators on this machine first; then every third step of plans spread over the frontier
and of the presets is timed, plans interleaved, medians of the slowest rank.

    python packages/autopar/benchmarks/bench_hosts.py --model vgg --link 200      # about 3 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar import Cluster, apply, measure_operators, models, search, search_presets, trace
from autopar.plan import Plan
from core_kernels.comm import Group
from core_kernels.console import format_bytes, format_seconds, say, table
from core_kernels.testing import ShapedHosts

MODELS: dict[str, Callable[[], Any]] = {
    "vgg": lambda: models.vgg16(image=32, classes=64, batch=64, shrink=8, hidden=1024),
    "gpt": lambda: models.gpt(layers=2, width=128, heads=4, vocabulary=512, length=32, batch=16),
    "mlp": lambda: models.mlp(width=512, hidden=2048, classes=64, batch=64),
    "mlp_mixer": lambda: models.mlp_mixer(blocks=2, width=128, image=64, patch=8, classes=64, batch=32),
}


def make(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and its batch, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]()


def measure_links(group: Group, budget_seconds: float) -> Cluster:
    """Measure the collectives of four ranks. Collective: all ranks."""
    return Cluster.measure(group, budget_seconds)


def time_plans(group: Group, name: str, plans: list[Plan], rounds: int) -> list[list[float]]:
    """Time steps of every plan, interleaved. Collective: all ranks."""
    model, batch = make(name)
    graph = trace(model, batch)
    applied = [apply(model, plan, graph, group) for plan in plans]
    optimizers = [torch.optim.AdamW(parallel.parameters(), lr=1e-4) for parallel in applied]
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds + 1):
        for number, (parallel, optimizer) in enumerate(zip(applied, optimizers, strict=True)):
            group.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            parallel(*batch).backward()
            optimizer.step()
            if turn:
                times[number].append(time.perf_counter() - begin)
    return times


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation."""
    places = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def compare(name: str, link: float, num_plans: int, rounds: int, budget: float) -> dict[str, Any]:
    """Predict and time plans of one model, and return a row."""
    graph = trace(*make(name))
    with ShapedHosts([1, 1, 1, 1], link_rate_mbit=link) as hosts:
        cluster = hosts.run(measure_links, budget, deadline_seconds=120)[0]
        cluster = measure_operators(graph, replace(cluster, launch_seconds=3e-5), [(4,)], repeats=3)
        frontier = search(graph, cluster, [(4,)])
        presets = search_presets(graph, cluster)
        places = np.unique(np.linspace(0, len(frontier) - 1, num_plans).round().astype(int))
        plans = [*(frontier[int(place)] for place in places), *presets.values()]
        ranks = hosts.run(time_plans, name, plans, rounds, deadline_seconds=280)
    measured = [
        statistics.median(max(rank[number][turn] for rank in ranks) for turn in range(rounds))
        for number in range(len(plans))
    ]
    predicted = [plan.seconds for plan in plans]
    spread = len(places)
    usual = dict(zip(presets, measured[spread:], strict=True))
    chosen = measured[spread - 1]  # the fastest by prediction
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {
        "model": name,
        "link_mbit": link,
        "plans": len(plans),
        "rank_correlation": rank_correlation(predicted, measured),
        "mean_error": float(np.mean(errors)),
        "chosen_seconds": chosen,
        "presets": usual,
        "best_preset_over_chosen": min(usual.values()) / chosen,
        "points": [
            {"memory_bytes": plan.predicted.memory_bytes, "predicted": p, "measured": m}
            for plan, p, m in zip(plans, predicted, measured, strict=True)
        ],
    }


def main() -> None:
    """Measure and print a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated; all when left out")
    parser.add_argument("--link", type=float, default=200.0, help="megabit per second of each host (%(default)s)")
    parser.add_argument("--plans", type=int, default=20, help="plans of the frontier to time (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each plan (default %(default)s)")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds to measure the links (%(default)s)")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.model or MODELS:
        row = compare(name, args.link, args.plans, args.rounds, args.budget)
        rows.append(row)
        shown = [(format_bytes(p["memory_bytes"]), *map(format_seconds, (p["predicted"], p["measured"]))) for p in row["points"]]  # fmt: skip  # noqa: E501
        title = (
            f"{name}: rank correlation {row['rank_correlation']:.3f}, mean error {row['mean_error']:.0%}, "
            f"best of {', '.join(row['presets'])} over chosen {row['best_preset_over_chosen']:.2f}"
        )
        table(title, ["memory per device", "predicted", "measured"], shown)
        say(json.dumps({key: value for key, value in row.items() if key != "points"}))
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
