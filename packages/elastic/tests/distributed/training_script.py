"""The training program of the tests: a worker that logs the samples and the loss of every committed step."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import elastic_train
from elastic_train.adaptation import BatchSchedule, GrowWithNoise, adapt
from elastic_train.shards import TextLines

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--step-seconds", type=float, default=0.02)
parser.add_argument("--dtype", default="float64")
parser.add_argument("--forget-to-notify", action="store_true")
parser.add_argument("--shards", type=Path, help="folder of text files with the numbers of samples, one a line")
parser.add_argument("--checkpoint")
parser.add_argument("--adapt", action="store_true")
parser.add_argument("--logical", type=int, default=0)
args = parser.parse_args()

worker = os.environ["ELASTIC_TRAIN_WORKER"]
torch.set_num_threads(1)
torch.set_default_dtype(getattr(torch, args.dtype))
generator = torch.Generator().manual_seed(5)
x_all = torch.randn(args.samples, 8, generator=generator)
data = torch.utils.data.TensorDataset(x_all, x_all.sum(1, keepdim=True).tanh())

job = elastic_train.init(logical_workers=args.logical, checkpoint=args.checkpoint, checkpoint_every=5)
torch.manual_seed(int.from_bytes(worker.encode()) if job.agent.newest else 1)  # newcomers begin with other weights
width = args.width + worker.startswith("odd")
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
model = elastic_train.wrap(model)
optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
elastic_train.State(model=model, optimizer=optimizer)
ids: list[int] = []


def collate(lines: list[str]) -> list[torch.Tensor]:
    ids[:] = map(int, lines)
    return torch.utils.data.default_collate([data[index] for index in ids])


if args.shards:
    queue = elastic_train.ShardQueue(sorted(args.shards.glob("*.txt")), TextLines(), num_streams=4)
    loader = elastic_train.ElasticDataLoader(queue, 32, args.epochs, collate=collate)
else:
    loader = elastic_train.ElasticDataLoader(data, global_batch_size=32, num_epochs=args.epochs)
if args.adapt:
    schedule = BatchSchedule({9: 48, 20: 16})
    adapt(schedule, GrowWithNoise(1), learning_rate="sqrt")  # the second only measures
log = (Path(args.folder) / f"{worker}.jsonl").open("a")


def write(**fields: object) -> None:
    log.write(json.dumps(fields) + "\n")
    log.flush()


last, hurry = time.time(), Path(args.folder) / "hurry"
for x, y in loader:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    if not hurry.exists():  # steps are slow until the test has seen what it waits for
        time.sleep(args.step_seconds)
    step, share = job.step, job.gradients.share
    used = (ids if share else []) if args.shards else loader.indices
    if optimizer.step():
        write(step=step, epoch=job.epoch, ids=list(used), loss=loss.item() * share)
        if args.forget_to_notify:
            continue
        info = elastic_train.notify_batch_end()
        now = time.time()
        write(ended=step, size=info.num_workers, is_resized=info.is_resized, pause=info.pause_seconds,
              seconds=now - last, at=now)  # fmt: skip
        last = now
content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
flat = torch.cat([p.detach().double().view(-1) for p in model.parameters()])
final = {"hash": hashlib.sha256(content).hexdigest(), "norm": flat.norm().item(), "sum": flat.sum().item()}
write(step=job.step, has_left=job.links is None and job.epoch < args.epochs, **final)
