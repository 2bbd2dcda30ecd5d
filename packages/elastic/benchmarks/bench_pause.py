"""How long a job stands still when it takes one more worker: stop-free, against stopping and restarting it.

Workers emulate an accelerator: a step sleeps, then sums the gradients of a model of the size asked for. Per size, a job
of two workers takes a third. ``pause_seconds`` is how long the switch held an old worker up beyond its step,
``restart_seconds`` the time from starting two fresh processes to their first step, the least that a restart costs.

    python benchmarks/bench_pause.py --megabytes 6 100
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import elastic_train
from elastic_train.events import read_events
from elastic_train.launchers import LocalJob


def work(folder: Path, megabytes: float, step_seconds: float, num_steps: int) -> None:
    """Train one worker; the model, with AdamW's two moments, has the bytes asked for."""
    torch.set_num_threads(1)
    job = elastic_train.init()
    width = max(int(math.sqrt(megabytes * 1e6 / 3 / 4 / 4)), 1)
    model = elastic_train.wrap(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))))
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    elastic_train.State(model=model, optimizer=optimizer)
    data = torch.zeros(6 * num_steps, width)
    loader = elastic_train.ElasticDataLoader(data, global_batch_size=6)
    with (folder / f"{os.environ['ELASTIC_TRAIN_WORKER']}.jsonl").open("a") as log:
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            time.sleep(step_seconds)
            if optimizer.step():
                info = elastic_train.notify_batch_end()
                log.write(json.dumps({"at": time.monotonic(), "size": info.num_workers, "step": job.step}) + "\n")
                log.flush()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def gaps(entries: list[dict]) -> list[tuple[float, dict]]:
    return [(after["at"] - before["at"], after) for before, after in pairwise(entries)]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(megabytes: float, step_seconds: float, num_steps: int) -> dict[str, float]:
    """Return the figures of one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [__file__, "--worker", name, "--megabytes", str(megabytes), "--step-seconds", str(step_seconds)]
        command += ["--steps", str(num_steps)]
        environment = {"OMP_NUM_THREADS": "1"}
        begin = time.monotonic()
        with LocalJob(command, folder, min_workers=2, environment=environment, niceness=5) as job:
            job.scale_out(2)
            while len(read(folder / "w0.jsonl")) < 20:
                time.sleep(0.05)
            first_step = read(folder / "w0.jsonl")[0]["at"] - begin
            called = time.monotonic()
            job.scale_out(1)
            job.wait(300)
            entries = read(folder / "w0.jsonl")
            before = [gap for gap, entry in gaps(entries) if entry["at"] < called][3:]
            during = [gap for gap, entry in gaps(entries) if entry["at"] > called and entry["size"] == 2]
            at = next(i for i, entry in enumerate(entries) if entry["size"] == 3)
            longest = max(gap for gap, _ in gaps(entries)[at - 2 : at + 2])
            events = read_events(job.events)
        switch = [e["seconds"] for e in events if e["event"] == "switched"]
        base = median(before)
        return {
            "state_megabytes": megabytes,
            "step_seconds": base,
            "pause_seconds": max(switch),
            "longest_step_seconds": longest,
            "restart_seconds": first_step,
            "restart_over_pause": first_step / max(switch),
            "prepare_throughput": base / (sum(during) / len(during)),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[6.0, 100.0])
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all sizes there")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Path(args.worker), args.megabytes[0], args.step_seconds, args.steps)
        sys.exit()
    found = {}
    for size in args.megabytes:
        found[f"{size:g} MB"] = measure(size, args.step_seconds, args.steps)
        print(json.dumps(found[f"{size:g} MB"]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
