"""A job of sharded replicas that grows and shrinks: forks its workers, so that torch is imported once; prints JSON.

Two processes hold the model; a second replica of two joins and one of the first leaves, which takes its fellow along.
A job of one process that holds everything is the reference. A twin of one replica sums gradients without their weights.

    sharded_script.py FOLDER leave|kill WORKER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic_train
from elastic_train.events import read_events
from elastic_train.sharding import ShardedGradients, replica_mesh

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
SAMPLES, BATCH = 600, 10


def train(folder: Path, worker: str, num_shards: int) -> None:
    """Train one process and write its samples, and at the end the whole weights."""
    os.environ |= {"ELASTIC_TRAIN_SHARDS": str(num_shards), "ELASTIC_TRAIN_EVENTS": str(folder / "events.jsonl")}
    job = elastic_train.init(f"file://{folder}", "job", 1, 2, worker)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())
    torch.manual_seed(sum(worker.encode()) if worker.startswith("b") else 1)  # newcomers begin with other weights
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
    if num_shards > 1:
        mesh = replica_mesh(job)
        for parameter in model.parameters():  # processes of one replica must begin alike
            dist.broadcast(parameter.detach(), 0)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model = elastic_train.wrap(model)
    if folder.name == "twin":
        ShardedGradients._weigh = lambda self, output: output
    # With its usual, small eps AdamW would not see gradients that are twice as large.
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1))
    elastic_train.State(model=model, optimizer=optimizer)
    loader = elastic_train.ElasticDataLoader(data, global_batch_size=BATCH)
    is_slow = folder / "slow"
    with (folder / f"{worker}.jsonl").open("w") as log:
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            time.sleep(0.1 if is_slow.exists() else 0)
            step, ids = job.step, list(loader.indices)
            if optimizer.step():
                info = elastic_train.notify_batch_end()
                print(json.dumps({"step": step, "ids": ids, "size": info.num_workers}), file=log, flush=True)
        if not job.epoch:
            return  # it left
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        print(json.dumps({"weights": torch.cat([p.detach().view(-1) for p in whole]).tolist()}), file=log, flush=True)


def fork(folder: Path, worker: str, num_shards: int) -> int:
    """Start a worker; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        train(folder, worker, num_shards)
        code = 0
    except BaseException as error:
        print(f"{worker}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait_for(folder: Path, event: str, size: int) -> None:
    """Wait until a generation of a size is proposed or runs."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
        if events and [e for e in events if e["event"] == event and len(e["members"]) == size]:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no {event} of {size} workers")


def main() -> None:
    """Run the reference and the sharded job."""
    folder = Path(sys.argv[1])
    alone, twin, sharded = (folder / name for name in ("alone", "twin", "sharded"))
    for path in (alone, twin, sharded):
        path.mkdir()
    pids = [fork(alone, "w", 1), *(fork(twin, f"a.{shard}", 2) for shard in (0, 1))]
    (sharded / "slow").touch()
    started = {name: fork(sharded, name, 2) for name in ("a.0", "a.1")}
    wait_for(sharded, "commit", 2)
    started |= {name: fork(sharded, name, 2) for name in ("b.0", "b.1")}
    wait_for(sharded, "commit", 4)
    if sys.argv[2] == "kill":
        os.kill(started[sys.argv[3]], signal.SIGKILL)
    else:
        controller = elastic_train.Controller(f"file://{sharded}", "job")
        controller.scale_in([sys.argv[3]])
        controller.close()
    while not [e for e in read_events(sharded / "events.jsonl") if e["event"] == "commit" and e["generation"] == 3]:
        time.sleep(0.02)
    (sharded / "slow").unlink()
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in started.items()}
    others = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps({"codes": codes, "others": others}))


if __name__ == "__main__":
    main()
