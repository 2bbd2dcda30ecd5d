"""Kill or pause workers at random instants, many times over, and check each job against one that nothing happens to.

Every trial is a job of its own: three workers, forked from this process so that they start in milliseconds, train some
steps; one of them is struck at a random instant. Afterwards all survivors must hold the same weights, every sample must
have counted once (the weights equal those of a run of one worker), and generations must form one line.

    python benchmarks/campaign.py kill 200
    python benchmarks/campaign.py pause 20
    python benchmarks/campaign.py resize 100
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic_train
from elastic_train.events import read_events

SAMPLES, BATCH, EPOCHS = 500, 20, 2


def train(folder: Path, worker: str, min_workers: int, step_seconds: float, epochs: int = EPOCHS) -> None:
    """Train one worker and write its commits and its final weights."""
    os.environ["ELASTIC_TRAIN_EVENTS"] = str(folder / "events.jsonl")
    torch.set_default_dtype(torch.float64)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())
    job = elastic_train.init(f"file://{folder}", "job", min_workers, 16, worker, lease_seconds=1.0, timeout_seconds=5.0)
    torch.manual_seed(1)
    model = elastic_train.wrap(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    elastic_train.State(model=model, optimizer=optimizer)
    loader = elastic_train.ElasticDataLoader(data, global_batch_size=BATCH, num_epochs=epochs)
    log = (folder / f"{worker}.jsonl").open("a")
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        time.sleep(step_seconds)
        step, ids = job.step, loader.indices
        if optimizer.step():
            log.write(json.dumps({"step": step, "ids": ids, "at": time.time()}) + "\n")
            log.flush()
            elastic_train.notify_batch_end()
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    has_left = job.epoch < epochs
    log.write(json.dumps({"final": digest, "has_left": has_left, "weights": weights[:16].tolist()}) + "\n")
    log.close()


def fork(folder: Path, worker: str, min_workers: int, step_seconds: float, epochs: int = EPOCHS) -> int:
    """Start a worker; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        train(folder, worker, min_workers, step_seconds, epochs)
        code = 0
    except BaseException as error:
        print(f"{worker}: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def read(folder: Path) -> tuple[dict[str, list[dict]], dict[str, dict]]:
    """Return the commits of each worker, and the final line of those that trained to the end."""
    lines = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in folder.glob("w*.jsonl")}
    commits = {name: [line for line in found if "ids" in line] for name, found in lines.items()}
    ends = {name: found[-1] for name, found in lines.items() if found and found[-1].get("has_left") is False}
    return commits, ends


def check(folder: Path, reference: dict, num_survivors: int, victim: str | None) -> list[str]:
    """Return what is wrong with a finished job."""
    commits, ends = read(folder)
    wrong = []
    if len(ends) != num_survivors or len({end["final"] for end in ends.values()}) != 1:
        wrong.append(f"survivors differ: {ends}")
    weights = [torch.tensor(end["weights"]) for end in ends.values()]
    if not all(torch.allclose(found, torch.tensor(reference["weights"]), rtol=1e-9) for found in weights):
        wrong.append("weights differ from those of one worker")
    used: dict[int, list[int]] = {}
    for found in commits.values():
        for line in found:
            used.setdefault(line["step"] * BATCH // SAMPLES, []).extend(line["ids"])
    for epoch, ids in used.items():
        if len(ids) != len(set(ids)) or (victim is None and len(ids) != SAMPLES):
            wrong.append(f"epoch {epoch}: {len(ids)} samples, {len(set(ids))} different")
    proposed = [e["generation"] for e in read_events(folder / "events.jsonl") if e["event"] == "propose"]
    if proposed != list(range(1, len(proposed) + 1)):
        wrong.append(f"generations {proposed}")
    return wrong


def strike(kind: str, num_trials: int, seed: int, limit_seconds: float) -> dict[str, Any]:
    """Run the trials; returns what went wrong and how long recovery took."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        os.waitpid(fork(Path(name), "w0", 1, 0.0), 0)
        reference = read(Path(name))[1]["w0"]
    wrong, seconds, num_leaders, num_missed = [], [], 0, 0
    begun = time.monotonic()
    for trial in range(num_trials):
        if time.monotonic() - begun > limit_seconds:
            num_trials = trial
            break
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pids = {f"w{i}": fork(folder, f"w{i}", 3, 0.004) for i in range(3)}
            events = folder / "events.jsonl"
            begin = time.time()
            while not (events.exists() and '"commit"' in events.read_text()):
                time.sleep(0.005)
                if time.time() - begin > 15:
                    print(events.read_text())
                    raise TimeoutError("the job did not start")
            time.sleep(rng.uniform(0, 0.2))
            leader = next(e["worker"] for e in read_events(events) if e["event"] == "leader")
            victim = leader if trial % 2 else rng.choice([w for w in pids if w != leader])
            num_leaders += victim == leader
            struck = time.time()
            os.kill(pids[victim], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            for pid in pids.values():
                os.waitpid(pid, 0)
            _, ends = read(folder)
            if len(ends) == 3:  # it had just ended
                num_missed += 1
                continue
            found = check(folder, reference, 2, victim)
            wrong += [f"trial {trial} ({victim}): {text}" for text in found]
            failed = [e["t"] for e in read_events(events) if e["event"] == "failed"]
            commits = [line["at"] for w, lines in read(folder)[0].items() if w != victim for line in lines]
            after = [at for at in commits if failed and at > max(failed)]
            if after:
                seconds.append(min(after) - struck)
    seconds.sort()
    at = lambda share: seconds[min(int(share * len(seconds)), len(seconds) - 1)] if seconds else None  # noqa: E731
    return {
        "kind": kind, "trials": num_trials, "leaders_struck": num_leaders, "ended_before": num_missed, "wrong": wrong,
        "recoveries": len(seconds), "median_seconds": at(0.5), "p95_seconds": at(0.95), "max_seconds": at(1.0),
    }  # fmt: skip


def usage(pid: int) -> dict[str, int]:
    """Return memory, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def resize(num_resizes: int) -> dict[str, Any]:
    """Let one worker join and leave over and over; returns what the two that stay hold before and after."""
    controller = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stay = [fork(folder, f"w{i}", 2, 0.004, epochs=10**6) for i in range(2)]
        controller = elastic_train.Controller(f"file://{folder}", "job")

        def wait(size: int) -> None:
            while True:
                status = controller.status()
                if status["status"] == "commit" and len(status["members"]) == size:
                    return
                time.sleep(0.005)

        wait(2)
        samples = []
        for index in range(num_resizes // 2):
            pid = fork(folder, f"x{index}", 2, 0.004, epochs=10**6)
            wait(3)
            controller.scale_in([f"x{index}"])
            os.waitpid(pid, 0)
            wait(2)
            if index in (num_resizes // 20, num_resizes // 2 - 1):
                time.sleep(1.5)
                keys = len(controller._store.scan(""))
                samples.append({**usage(stay[0]), "keys": keys, "resizes": 2 * index + 2})
        for pid in stay:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        controller.close()
    return {"kind": "resize", "resizes": num_resizes, "early": samples[0], "late": samples[-1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["kill", "pause", "resize"])
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=3600, help="start no trial after this long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # What torch imports at the first step of an optimizer, workers inherit.
    warm = torch.nn.Parameter(torch.zeros(1))
    warm.grad = torch.zeros(1)
    torch.optim.AdamW([warm]).step()
    result = (
        resize(args.trials) if args.kind == "resize" else strike(args.kind, args.trials, args.seed, args.limit_seconds)
    )
    print(json.dumps(result, indent=1))
