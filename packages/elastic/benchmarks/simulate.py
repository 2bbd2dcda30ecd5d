"""The scheduling policies on public traces: what elasticity, cheap rescaling and lending buy, and how long it takes.

    python benchmarks/simulate.py ../shared/data/traces          # about two minutes

The folder holds ``pollux/workload-*.csv`` with ``pollux/apps``, and ``philly.csv.gz``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

from elastic_train.scheduler import (
    Cluster,
    policy,
    random_staged,
    read_philly,
    read_pollux,
    simulate,
    simulate_staged,
)
from elastic_train.scheduler.policies import ProbabilisticLending, StrictQuota
from elastic_train.scheduler.policies.quota import proportional_quotas

LOADS = (0.5, 1.0, 1.5, 2.0)


def compare_on_pollux(folder: Path) -> dict[str, Any]:
    """Return elastic-Tiresias over Tiresias, in mean completion, per workload and load, and the time of a workload."""
    slow, fast, seconds = {}, {}, []
    for path in sorted((folder / "pollux").glob("workload-*.csv")):
        jobs = read_pollux(path, folder / "pollux" / "apps")
        for load in LOADS:
            loaded = jobs.at_load(load)
            rigid = simulate(loaded, policy("tiresias"), Cluster(64)).completion_seconds.mean()
            begin = time.process_time()
            restarted = simulate(loaded, policy("elastic-tiresias"), Cluster(64, rescale_seconds=30.0))
            seconds.append(time.process_time() - begin)
            stop_free = simulate(loaded, policy("elastic-tiresias"), Cluster(64, rescale_seconds=0.5))
            name = f"{path.stem} at {load:g}"
            slow[name] = restarted.completion_seconds.mean() / rigid
            fast[name] = stop_free.completion_seconds.mean() / rigid
    return {
        "workloads_and_loads": len(slow),
        "rescale_30_s": {"best": min(slow.values()), "worst": max(slow.values())},
        "rescale_0.5_s": {"best": min(fast.values()), "worst": max(fast.values())},
        "better_at_every_load": bool(max(slow.values()) < 1 and max(fast.values()) < 1),
        "longest_simulation_of_160_jobs_seconds": max(seconds),
    }


def compare_lending(folder: Path) -> dict[str, Any]:
    """Return PPS over strict quota on 8,000 Philly jobs: utilization, and the worst group's 95 % wait."""
    jobs = read_philly(folder / "philly.csv.gz").first(8_000)
    quotas, cluster = proportional_quotas(jobs, 600), Cluster(600, round_seconds=300)
    strict, lending = (
        simulate(jobs, StrictQuota(quotas), cluster),
        simulate(jobs, ProbabilisticLending(quotas), cluster),
    )
    before, after = strict.wait_percentile(), lending.wait_percentile()
    worst = max(wait / before[group] if before[group] else float(wait > 0) for group, wait in after.items())
    return {
        "utilization": {"strict-quota": strict.utilization(), "pps": lending.utilization()},
        "worst_group_wait_over_strict": worst,
        "mean_completion_over_strict": float(lending.completion_seconds.mean() / strict.completion_seconds.mean()),
    }


def time_large(folder: Path) -> dict[str, float]:
    """Return the seconds of 100,000 Philly jobs on 5,000 GPUs, per policy."""
    jobs = read_philly(folder / "philly.csv.gz").repeated(100_000, 5_000)
    quotas, seconds = proportional_quotas(jobs, 5_000), {}
    for name in ("fifo", "tiresias", "elastic-tiresias", "elastic-simple", "goodput", "strict-quota", "pps"):
        settings = {"quotas": quotas} if name in ("strict-quota", "pps") else {}
        begin = time.process_time()
        simulate(jobs, policy(name, **settings), Cluster(5_000))
        seconds[name] = time.process_time() - begin
    return seconds


def compare_stages(num_seeds: int = 10) -> dict[str, Any]:
    """Return mean completion under coBranch over that under other policies, of made-up jobs of stages at full load."""
    over: dict[str, list[float]] = {"critical-path": [], "stage-fifo": []}
    for seed in range(num_seeds):
        jobs = random_staged(200, 32, 1.0, seed)
        own = simulate_staged(jobs, policy("cobranch"), 32).completion_seconds.mean()
        for name, ratios in over.items():
            ratios.append(float(own / simulate_staged(jobs, policy(name), 32).completion_seconds.mean()))
    return {f"cobranch_over_{name}": {"mean": mean(r), "best": min(r), "worst": max(r)} for name, r in over.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    result = {
        "pollux": compare_on_pollux(args.traces),
        "lending": compare_lending(args.traces),
        "stages": compare_stages(),
        "seconds_of_100_000_jobs_on_5_000_gpus": time_large(args.traces),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
