"""A replica under torchft: ``python _torchft.py FOLDER MEGABYTES STEP_SECONDS NAME LIGHTHOUSE``."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.bench._model import StepLog, make_model


def main() -> None:
    """Train until killed."""
    # torchft is an optional peer: pyright cannot find it everywhere.
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # pyright: ignore

    logging.disable(logging.INFO)
    folder, megabytes, step_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    name, lighthouse = sys.argv[4], sys.argv[5]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    module, x = make_model(megabytes)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=10),
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, inner)
    log = StepLog(folder, name)
    while True:
        optimizer.zero_grad()
        model(x).sum().backward()
        time.sleep(step_seconds)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            log.write(manager.num_participants(), manager.current_step())


if __name__ == "__main__":
    main()
