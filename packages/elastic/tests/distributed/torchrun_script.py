"""A training program that knows nothing of its launcher: it is started by torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_train

torch.set_num_threads(1)
folder = Path(sys.argv[1])
job = elastic_train.init()
torch.manual_seed(0)
x = torch.randn(60, 4)
model = elastic_train.wrap(nn.Linear(4, 1))
optimizer = elastic_train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
elastic_train.State(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
with (folder / f"{job.agent.worker}.jsonl").open("w") as log:
    for x, y in (loader := elastic_train.ElasticDataLoader(data, global_batch_size=6)):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        ids = list(loader.indices)
        if optimizer.step():
            size = elastic_train.notify_batch_end().num_workers
            print(json.dumps({"ids": ids, "size": size, "job": job.agent.job_id}), file=log, flush=True)
            while job.step == 2 and not (folder / "go").exists():  # until the test has looked at the job
                time.sleep(0.01)
                (folder / f"paused-{os.environ['RANK']}").touch()
