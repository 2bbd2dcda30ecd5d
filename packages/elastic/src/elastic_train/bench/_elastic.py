"""A worker under elastic-train: ``python -m elastic_train.bench._elastic FOLDER MEGABYTES STEP_SECONDS NUM_SETTLING``.

So many steps after every change all workers measure what the new group can do: the time of a broadcast of the state's
bytes from one worker to all others, and of a vote.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import elastic_train
from elastic_train.bench._model import StepLog, make_model
from elastic_train.group import Links

_PROBE_BYTES = 100_000_000


def probe(links: Links, num_bytes: int) -> dict[str, float]:
    """Return seconds of a broadcast of so many bytes, scaled from a smaller one where they are many, and of a vote."""
    if links.size == 1:
        return {"broadcast_seconds": 0.0, "vote_seconds": 0.0}
    sent = min(num_bytes, _PROBE_BYTES)
    flat, broadcasts, votes = torch.ones(sent, dtype=torch.uint8), [], []
    for _ in range(4):
        links.minimum([0])
        begin = time.perf_counter()
        links.broadcast_async(flat, 0).wait()
        links.minimum([0])
        broadcasts.append(time.perf_counter() - begin)
    for _ in range(50):
        begin = time.perf_counter()
        links.minimum([0, 0])
        votes.append(time.perf_counter() - begin)
    return {"broadcast_seconds": median(broadcasts[1:]) * num_bytes / sent, "vote_seconds": median(votes)}


def main() -> None:
    """Train until killed."""
    folder, megabytes, step_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    num_settling = int(sys.argv[4])
    job = elastic_train.init(timeout_seconds=10 + megabytes / 10)
    module, x = make_model(megabytes)
    model = elastic_train.wrap(module)
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = elastic_train.State(model=model, optimizer=optimizer)
    data = x.expand(1_000_000, x.shape[1])
    log, probe_at, fields = StepLog(folder, os.environ["ELASTIC_TRAIN_WORKER"]), -1, {}

    def work(x: Any) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()

    loader = elastic_train.ElasticDataLoader(data, global_batch_size=8, shuffle=False, warm_up=work)
    for x in loader:
        if probe_at < 0:
            probe_at = job.step + num_settling
        work(x)
        time.sleep(step_seconds)
        if not optimizer.step():
            continue
        info = elastic_train.notify_batch_end()
        if info.is_resized:
            probe_at = job.step + num_settling
        log.write(info.num_workers, job.step, pause_seconds=info.pause_seconds, **fields)
        fields = {}
        if job.step == probe_at and job.links is not None:
            fields = {**probe(job.links, state.num_bytes()), "is_probe": True}


if __name__ == "__main__":
    main()
