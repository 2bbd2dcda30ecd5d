"""elastic-train: a job starts with one worker, takes a second while it trains, and computes what one worker would.

    python examples/grow_while_training.py

The script is its own training script: workers of the job run ``work``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser, shown_error

import elastic_train
from core_kernels import datasets
from core_kernels.console import format_seconds
from elastic_train.events import read_events
from elastic_train.launchers import LocalJob

BATCH_SIZE, EPOCHS = 128, 2


def work(folder: Path) -> None:
    """Train as one worker; steps are slow until two have worked together for a while."""
    job = elastic_train.init()
    data = datasets.movielens()
    films = torch.utils.data.TensorDataset(data.features[data.train_mask], data.labels[data.train_mask])
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(data.num_features, 64), torch.nn.ReLU(), torch.nn.Linear(64, data.num_classes)
    )
    model = elastic_train.wrap(net)
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    elastic_train.State(model=model, optimizer=optimizer)
    loader = elastic_train.ElasticDataLoader(films, BATCH_SIZE, num_epochs=EPOCHS)
    worker = os.environ["ELASTIC_TRAIN_WORKER"]
    with (folder / f"{worker}.jsonl").open("w") as log:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            time.sleep(0 if (folder / "hurry").exists() else 0.2)
            line = {"step": job.step, "loss": loss.item() * job.gradients.share, "ids": loader.indices,
                    "epoch": job.epoch, "at": time.time()}  # fmt: skip
            if optimizer.step():
                print(json.dumps(line), file=log, flush=True)
                elastic_train.notify_batch_end()
    if worker == "w0":
        torch.save(net.state_dict(), folder / "weights.pt")


def train(script: str, folder: Path, grows: bool) -> tuple[LocalJob, list[dict]]:
    """Run a job whose workers are ``script --work FOLDER`` to its end; returns it and the lines of all workers."""
    folder.mkdir()
    environment = {"OMP_NUM_THREADS": "1", "ELASTIC_TRAIN_LEASE_SECONDS": "10"}
    with LocalJob([script, "--work", str(folder)], folder, environment=environment) as job:
        job.scale_out(1)
        if grows:
            job.wait_for_workers(1)
            job.scale_out(1)
            job.wait_for_workers(2)
            time.sleep(1)
        (folder / "hurry").touch()
        codes = job.wait(100)
    if any(codes.values()):
        sys.exit(f"workers ended with {codes}; read what they printed")
    return job, [json.loads(line) for path in sorted(folder.glob("w*.jsonl")) for line in path.read_text().splitlines()]


def losses(lines: list[dict]) -> list[float]:
    """Return the loss of each global batch, the sum of the workers' shares."""
    total = [0.0] * (1 + max(line["step"] for line in lines))
    for line in lines:
        total[line["step"]] += line["loss"]
    return total


def run() -> Chapter:
    """Run the job quietly and growing, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("quiet", "growing")]
        _, quiet = train(__file__, folders[0], grows=False)
        job, lines = train(__file__, folders[1], grows=True)
        pauses = [event["seconds"] for event in read_events(job.events) if event["event"] == "switched"]
        weights = [torch.load(folder / "weights.pt") for folder in folders]
    found, expected = losses(lines), losses(quiet)
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    drift = max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0])
    used = sorted((line["epoch"], i) for line in lines for i in line["ids"])
    is_once = used == sorted((line["epoch"], i) for line in quiet for i in line["ids"]) and len(set(used)) == len(used)

    figure, axes = new_figure()
    axes.plot(expected, linewidth=4, alpha=0.4, label="one worker")
    axes.plot(found, linewidth=1, label="grown from one to two")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    rows = [
        ("pause when the second worker joined", format_seconds(max(pauses))),
        ("largest difference of a loss to one worker", shown_error(difference)),
        ("largest difference of a weight at the end", shown_error(drift)),
        (f"every film used once in each of {EPOCHS} epochs", str(is_once)),
    ]
    return Chapter("elastic-train", "add a worker without stopping the job", rows, "", [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--work", type=Path, metavar="FOLDER", help="train as a worker of a job")
    args = options.parse_args()
    if args.work:
        work(args.work)
    else:
        finish([run()], args.report)
