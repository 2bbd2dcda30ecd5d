"""A worker under plain ``DistributedDataParallel`` with a checkpoint: ``_plain.py FOLDER MEGABYTES STEP_SECONDS``.

Asked to stop (SIGTERM), workers agree on the step, write a checkpoint and end; started again, in any number, they go
on from it. Every tenth step is kept too, for those that are killed. Runs under ``torchrun`` as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_train.bench._model import StepLog, make_model


def main() -> None:
    """Train until asked to stop."""
    is_asked = []
    signal.signal(signal.SIGTERM, lambda *_: is_asked.append(True))
    folder, megabytes, step_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    module, x = make_model(megabytes)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = torch.nn.parallel.DistributedDataParallel(module)
    log = StepLog(folder, f"plain-{os.getpid()}")

    def save() -> None:
        if rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "checkpoint.new")
            (folder / "checkpoint.new").rename(checkpoint)

    while True:
        optimizer.zero_grad()
        model(x).sum().backward()
        time.sleep(step_seconds)
        optimizer.step()
        step += 1
        log.write(size, step)
        stop = torch.tensor([float(bool(is_asked))])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            save()
            dist.barrier()
            dist.destroy_process_group()
            return
        if step % 10 == 0:
            save()


if __name__ == "__main__":
    main()
