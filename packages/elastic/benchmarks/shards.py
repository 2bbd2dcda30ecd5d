"""Random histories of jobs that read a queue of shards: every record once, and the losses of a quiet run.

Workers join, leave and are killed at random instants. Each writes a line just before it steps, so the records of a
step can be told even when a worker is killed right after the vote; a step done again counts in its last generation.

    python benchmarks/shards.py 20        # about a minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forked
import torch

import elastic_train
from elastic_train.shards import BinaryRecords, ShardQueue

LENGTHS, BATCH, EPOCHS, RECORD_BYTES = (61, 7, 0, 120, 33, 18, 90, 41, 77, 5, 64), 24, 3, 2


def train(folder: Path, worker: str, step_seconds: float) -> None:
    """Train one worker."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ["ELASTIC_TRAIN_EVENTS"] = str(folder / "events.jsonl")
    job = elastic_train.init(f"file://{folder}", "job", worker_id=worker, lease_seconds=5.0)
    torch.manual_seed(1)
    model = elastic_train.wrap(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    elastic_train.State(model=model, optimizer=optimizer)
    ids: list[int] = []

    def collate(records: list[int]) -> torch.Tensor:
        ids[:] = records
        return torch.tensor(records).double()[:, None] / 500

    reader = BinaryRecords(RECORD_BYTES, lambda record: int.from_bytes(record, "little"))
    queue = ShardQueue(sorted(folder.glob("*.bin")), reader, num_streams=4)
    with (folder / f"{worker}.jsonl").open("w") as log:
        for x in elastic_train.ElasticDataLoader(queue, BATCH, EPOCHS, collate=collate):
            optimizer.zero_grad()
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            time.sleep(step_seconds)
            assert job.links is not None
            share = job.gradients.share
            line = {"step": job.step, "generation": job.links.number, "epoch": job.epoch}
            line |= {"ids": ids if share else [], "loss": loss.item() * share}
            print(json.dumps(line), file=log, flush=True)
            if optimizer.step():
                elastic_train.notify_batch_end()


def fork(folder: Path, worker: str, step_seconds: float) -> int:
    """Start a worker; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        train(folder, worker, step_seconds)
        code = 0
    except BaseException as error:
        print(f"{worker}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait_for_commit(folder: Path, seconds: float = 60.0) -> None:
    """Wait until the job runs."""
    events, deadline = folder / "events.jsonl", time.monotonic() + seconds
    while not (events.exists() and '"commit"' in events.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job does not run after {seconds:g} s")
        time.sleep(0.005)


def members_of(folder: Path) -> list[str]:
    """Return the members of the newest generation."""
    # SQLite must not be open across a fork, so each look opens the store anew.
    with contextlib.closing(elastic_train.Controller(f"file://{folder}", "job")) as controller:
        return controller.status()["members"]


def join(folder: Path, worker: str, step_seconds: float) -> int:
    """Start a worker and wait until it is a member or the job has ended; returns its process id."""
    pid, deadline = fork(folder, worker, step_seconds), time.monotonic() + 2.0
    while worker not in members_of(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid


def steps_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each step that counted: those of the generation that did it last."""
    lines = [json.loads(line) for path in folder.glob("w*.jsonl") for line in path.read_text().splitlines()]
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["step"], []).append(line)
    return {
        step: [line for line in entries if line["generation"] == max(e["generation"] for e in entries)]
        for step, entries in sorted(found.items())
    }


def faults_of(steps: dict[int, list[dict[str, Any]]], quiet: list[float] | None) -> list[str]:
    """Return what is wrong with a job's records and losses."""
    faults = []
    for epoch in range(EPOCHS):
        ids = [i for entries in steps.values() for entry in entries if entry["epoch"] == epoch for i in entry["ids"]]
        if sorted(ids) != list(range(sum(LENGTHS))):
            faults.append(f"epoch {epoch}: {len(ids)} records, {len(set(ids))} different, of {sum(LENGTHS)}")
    losses = [sum(entry["loss"] for entry in entries) for entries in steps.values()]
    if quiet is not None:
        worst = max((abs(a - b) / b for a, b in zip(losses, quiet, strict=False)), default=1.0)
        if len(losses) != len(quiet) or worst > 1e-9:
            faults.append(f"{len(losses)} losses for {len(quiet)}, {worst:.1e} apart")
    return faults


def run(rng: random.Random | None, step_seconds: float) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """Run a job, disturbed unless ``rng`` is ``None``; returns its steps and what happened."""
    with tempfile.TemporaryDirectory() as name:
        folder, story, begin = Path(name), [], 0
        for number, length in enumerate(LENGTHS):
            records = b"".join(i.to_bytes(RECORD_BYTES, "little") for i in range(begin, begin + length))
            (folder / f"{number:02}.bin").write_bytes(records)
            begin += length
        pids = {"w0": fork(folder, "w0", step_seconds)}
        wait_for_commit(folder)
        for index in range(rng.randint(4, 7) if rng else 0):
            assert rng is not None
            time.sleep(rng.uniform(0.0, 0.15))
            members = [worker for worker in members_of(folder) if worker in pids]
            if len(members) > 1 and rng.random() < 0.6:
                victim = rng.choice(members)
                if rng.random() < 0.6:
                    os.kill(pids[victim], signal.SIGKILL)
                    story.append(f"{victim} is killed")
                else:
                    with contextlib.closing(elastic_train.Controller(f"file://{folder}", "job")) as controller:
                        controller.scale_in([victim])
                    story.append(f"{victim} leaves")
                os.waitpid(pids.pop(victim), 0)
            elif len(members) < 4:
                pids[f"w{index + 1}"] = join(folder, f"w{index + 1}", step_seconds)
                story.append(f"w{index + 1} comes")
        waiting, ended = dict(pids), float("inf")
        while waiting:
            for worker, pid in list(waiting.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del waiting[worker]
                    ended = min(ended, time.monotonic())
                elif time.monotonic() - ended > 3:  # it came when the others had ended
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return steps_of(folder), story


def main() -> dict[str, Any]:
    """Run all; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("histories", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    forked.warm_up()  # so that newcomers join while the job still runs
    rng = random.Random(args.seed)
    quiet_steps = run(None, 0.0)[0]
    quiet = [float(sum(entry["loss"] for entry in entries)) for entries in quiet_steps.values()]
    assert faults_of(quiet_steps, None) == []
    runs = [run(rng, 0.02) for _ in range(args.histories)]
    result = {
        "histories": len(runs),
        "joins": sum(line.endswith("comes") for _, story in runs for line in story),
        "leaves": sum(line.endswith("leaves") for _, story in runs for line in story),
        "kills": sum(line.endswith("killed") for _, story in runs for line in story),
        "steps": len(quiet),
        "records": EPOCHS * sum(LENGTHS),
        "wrong": [(index, fault) for index, (steps, _) in enumerate(runs) for fault in faults_of(steps, quiet)],
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
