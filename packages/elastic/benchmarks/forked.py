"""Jobs of workers forked from this process, which start in milliseconds, for campaigns of many jobs.

Each worker trains a small model in float64 and writes a line per committed step and one at its end. :func:`check` tells
what is wrong with a finished job: weights that differ between survivors or from those of an undisturbed run, samples
that counted twice or not at all, generations that do not form one line.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic_train
from elastic_train.events import read_events

SAMPLES, BATCH = 500, 20


@dataclass
class Settings:
    """What the workers of a job have in common.

    Attributes:
        min_workers: Workers the job waits for.
        step_seconds: Time a worker sleeps in each pass.
        epochs: Passes over the data.
        width: Width of the model.
        logical_workers: As for ``elastic_train.init``.
        store: Address of the store; the job's folder when empty.
        interface: Address that sockets bind to.
        token: The job's token, for a store of another kind than a folder.
        lease_seconds: Length of a lease.
        prepare: Called in a worker before it joins.
    """

    min_workers: int = 1
    step_seconds: float = 0.0
    epochs: int = 2
    width: int = 64
    logical_workers: int = 0
    store: str = ""
    interface: str = "127.0.0.1"
    token: str | None = None
    lease_seconds: float = 1.0
    prepare: Callable[[elastic_train.Job], None] | None = None


def warm_up() -> None:
    """Import here what workers would import at their first step, so that they inherit it."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


def train(folder: Path, worker: str, settings: Settings) -> None:
    """Train one worker and write its commits and its final weights."""
    os.environ["ELASTIC_TRAIN_EVENTS"] = str(folder / "events.jsonl")
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())
    job = elastic_train.init(
        settings.store or f"file://{folder}", "job", settings.min_workers, 16, worker,
        lease_seconds=settings.lease_seconds, timeout_seconds=5.0, interface=settings.interface, token=settings.token,
        logical_workers=settings.logical_workers,
    )  # fmt: skip
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(8, settings.width), nn.Tanh(), nn.Linear(settings.width, 1)]
    if settings.logical_workers:
        layers[2:2] = [nn.BatchNorm1d(settings.width), nn.Dropout(0.2)]
    model = elastic_train.wrap(nn.Sequential(*layers))
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    elastic_train.State(model=model, optimizer=optimizer)
    loader = elastic_train.ElasticDataLoader(data, global_batch_size=BATCH, num_epochs=settings.epochs)
    if settings.prepare:
        settings.prepare(job)
    with (folder / f"{worker}.jsonl").open("a") as log:
        for x, y in loader:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            time.sleep(settings.step_seconds)
            step, ids, generation = job.step, list(loader.indices), job.links.number if job.links else 0
            share = job.gradients.share if job.gradients else 1.0
            if optimizer.step():
                line = {
                    "step": step,
                    "generation": generation,
                    "ids": ids,
                    "loss": loss.item() * share,
                    "at": time.time(),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                elastic_train.notify_batch_end()
        content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()])[:16].tolist()
        digest = hashlib.sha256(content).hexdigest()
        has_left = job.epoch < settings.epochs
        log.write(json.dumps({"final": digest, "has_left": has_left, "weights": weights}) + "\n")


def fork(folder: Path, worker: str, settings: Settings) -> int:
    """Start a worker; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        train(folder, worker, settings)
        code = 0
    except BaseException as error:
        print(f"{worker}: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def wait_for_event(folder: Path, event: str, number: int = 1, seconds: float = 30) -> None:
    """Wait until an event has happened so many times."""
    path, deadline = folder / "events.jsonl", time.time() + seconds
    while not (path.exists() and path.read_text().count(f'"event": "{event}"') >= number):
        time.sleep(0.005)
        if time.time() > deadline:
            raise TimeoutError(f"no {event} within {seconds} s:\n{path.read_text() if path.exists() else ''}")


def read(folder: Path) -> tuple[dict[str, list[dict]], dict[str, dict]]:
    """Return the commits of each worker, and the final line of those that trained to the end."""
    lines = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in folder.glob("w*.jsonl")}
    commits = {name: [line for line in found if "ids" in line] for name, found in lines.items()}
    ends = {name: found[-1] for name, found in lines.items() if found and found[-1].get("has_left") is False}
    return commits, ends


def losses(folder: Path) -> list[float]:
    """Return the loss of each global batch, the sum of the workers' shares."""
    total: dict[int, float] = {}
    for line in _counted(read(folder)[0]):
        total[line["step"]] = total.get(line["step"], 0.0) + line["loss"]
    return [total[step] for step in sorted(total)]


def check(folder: Path, reference: dict[str, Any], num_survivors: int | None, is_struck: bool) -> list[str]:
    """Return what is wrong with a finished job.

    Args:
        folder: Its folder.
        reference: The final line of an undisturbed run.
        num_survivors: Workers that must have trained to the end; ``None`` for any, at least one.
        is_struck: Whether a worker was lost, and with it perhaps a line of its log.
    """
    commits, ends = read(folder)
    wrong = []
    if not ends or len(ends) != (num_survivors or len(ends)) or len({end["final"] for end in ends.values()}) != 1:
        wrong.append(f"survivors differ: {ends}")
    weights = [torch.tensor(end["weights"]) for end in ends.values()]
    if not all(torch.allclose(found, torch.tensor(reference["weights"]), rtol=1e-9) for found in weights):
        wrong.append("weights differ from those of one worker")
    used: dict[int, list[int]] = {}
    for line in _counted(commits):
        used.setdefault(line["step"] * BATCH // SAMPLES, []).extend(line["ids"])
    for epoch, ids in used.items():
        if len(ids) != len(set(ids)) or (not is_struck and len(ids) != SAMPLES):
            wrong.append(f"epoch {epoch}: {len(ids)} samples, {len(set(ids))} different")
    proposed = [e["generation"] for e in read_events(folder / "events.jsonl") if e["event"] == "propose"]
    if proposed != list(range(1, len(proposed) + 1)):
        wrong.append(f"generations {proposed}")
    return wrong


def _counted(commits: dict[str, list[dict]]) -> list[dict]:
    """Return the lines of the steps that counted.

    A worker may end a step whose vote reached only itself, and then be lost: the survivors do that step again in their
    generation, and what the lost worker did is nowhere in their state.
    """
    lines, newest = [line for found in commits.values() for line in found], {}
    for line in lines:
        newest[line["step"]] = max(line["generation"], newest.get(line["step"], 0))
    return [line for line in lines if line["generation"] == newest[line["step"]]]


def usage(pid: int) -> dict[str, int]:
    """Return memory, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "own_kib": int(fields["RssAnon"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def quantile(values: list[float], share: float) -> float | None:
    """Return a quantile, ``None`` of nothing."""
    found = sorted(values)
    return found[min(int(share * len(found)), len(found) - 1)] if found else None
