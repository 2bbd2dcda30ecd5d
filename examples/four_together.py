"""Four packages on one model: trained elastically by gnn-parallel, tuned over gnn-comm, evaluated by gnn-eval.

    python examples/four_together.py

1. elastic-train underneath: a job of one worker samples and trains with gnn-parallel's engine, takes a second worker
   while it runs, and both share every batch. Samples are keyed by node, so the losses are those of one worker.
2. gnn-comm: two ranks go on from those weights on the full graph, exchanging rows by a plan.
3. gnn-eval: the tuned model is evaluated on every film in bounded memory; its result is that of gnn-comm's ranks.

One set of weights passes through all of them: the layers are those of ``core_kernels.nn``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser, shown_error
from evaluate_every_node import Net as WholeNet
from full_graph_exchange import HIDDEN, fit
from full_graph_exchange import Net as SpreadNet
from grow_while_training import losses as losses_of
from grow_while_training import train as train_job

import elastic_train
import gnn_comm
import gnn_eval
import gnn_parallel
from core_kernels import datasets, launch, partition_graph
from core_kernels.comm import Group
from core_kernels.console import format_bytes, format_seconds
from core_kernels.interconnect import Interconnect
from core_kernels.topology import processor_topology
from elastic_train.events import read_events

BATCH_SIZE, FANOUTS, EPOCHS = 512, (10, 10), 4


def work(folder: Path) -> None:
    """Train as one worker of the elastic job."""
    job = elastic_train.init()
    data, group = datasets.movielens(), Group.single()
    train_ids = data.train_mask.nonzero().view(-1)
    net = gnn_parallel.make_model("sage", data.num_features, HIDDEN, data.num_classes, len(FANOUTS))
    plan = gnn_parallel.plan(
        data.graph,
        net,
        features=data.features,
        partition=partition_graph(data.graph, 1),
        fanouts=FANOUTS,
        batch_size=BATCH_SIZE,
        seeds=train_ids,
        interconnect=Interconnect.preset("loopback-cpu"),
        group=group,
    )
    engine = gnn_parallel.Engine(plan, net, group)
    elastic_train.wrap(net)
    optimizer = elastic_train.Optimizer(torch.optim.Adam(net.parameters(), lr=0.005))
    elastic_train.State(model=net, optimizer=optimizer)
    worker = os.environ["ELASTIC_TRAIN_WORKER"]
    with (folder / f"{worker}.jsonl").open("w") as log:
        for seeds in elastic_train.ElasticDataLoader(train_ids, BATCH_SIZE, num_epochs=EPOCHS, collate=torch.stack):
            # One batch with these seeds; its number keys the sampling, so every worker count draws the same samples.
            (batch,) = engine.loader(seeds, data.labels, epoch=job.step, shuffle=False)
            optimizer.zero_grad()
            loss = F.cross_entropy(engine(batch), batch.y)
            loss.backward()
            time.sleep(0 if (folder / "hurry").exists() else 0.2)
            step, share = job.step, job.gradients.share
            if optimizer.step():
                print(json.dumps({"step": step, "loss": loss.item() * share}), file=log, flush=True)
                elastic_train.notify_batch_end()
    if worker == "w0":
        torch.save(net.state_dict(), folder / "weights.pt")


def train_elastically(folder: Path, grows: bool) -> tuple[list[float], list[dict]]:
    """Run the job; returns the loss of every global batch and the job's events."""
    job, lines = train_job(__file__, folder, grows)
    return losses_of(lines), read_events(job.events)


def tune(group, plan: gnn_comm.Plan, weights: str, epochs: int) -> tuple[list[float], dict, torch.Tensor, int]:
    """Go on with full-graph training on one rank; returns losses, weights, all output rows and bytes sent."""
    data = datasets.movielens()
    communicator = gnn_comm.Communicator(plan, group)
    x, labels = communicator.dispatch(data.features), communicator.dispatch(data.labels, own_only=True)
    mask = communicator.dispatch(data.train_mask, own_only=True)
    model = SpreadNet(data.num_features, data.num_classes)
    model.load_state_dict(torch.load(weights))
    losses = fit(group, communicator, model, x, labels, mask, epochs, learning_rate=0.002)
    with torch.no_grad():
        rows = communicator.collect(model(communicator, x))
    sent = int(group.all_reduce(torch.tensor(communicator.sent_bytes())))
    communicator.close()
    return losses, model.state_dict(), rows, sent


def run(epochs: int = 10) -> Chapter:
    """Run the three parts one after another."""
    data = datasets.movielens()
    with tempfile.TemporaryDirectory() as name:
        quiet, _ = train_elastically(Path(name) / "quiet", grows=False)
        losses, events = train_elastically(Path(name) / "growing", grows=True)
        pause = max(event["seconds"] for event in events if event["event"] == "switched")
        machine = processor_topology(2)
        plan = gnn_comm.plan(gnn_comm.partition(data.graph, machine), machine, width=HIDDEN)
        weights = str(Path(name) / "growing" / "weights.pt")
        tuned, state, rows, sent = launch.run_ranks(tune, 2, plan, weights, epochs, timeout_seconds=120.0)[0]

    model = WholeNet(data.num_features, HIDDEN, data.num_classes).eval()
    model.load_state_dict(state)
    out = gnn_eval.evaluate(model, (data.graph, data.features), memory="32MB")
    accuracy = (out.argmax(1) == data.labels)[data.test_mask].float().mean().item()

    figure, (left, right) = new_figure(8, num_axes=2)
    left.plot(quiet, linewidth=4, alpha=0.4, label="one worker")
    left.plot(losses, linewidth=1, label="grown to two")
    left.set(xlabel="step", ylabel="loss, sampled")
    left.legend()
    right.plot(tuned)
    right.set(xlabel="epoch", ylabel="loss, full graph")
    difference = float((out - rows).abs().max() / rows.abs().max())
    growth = max(abs(a - b) for a, b in zip(losses, quiet, strict=True))
    rows_shown = [
        ("pause when the second worker joined", format_seconds(pause)),
        ("largest difference of a sampled loss to one worker", shown_error(growth)),
        (f"rows sent in {epochs} full-graph epochs on 2 ranks", format_bytes(sent)),
        (
            "gnn-eval against gnn-comm, largest relative",
            shown_error(difference),
        ),
        ("test accuracy", f"{accuracy:.1%}"),
    ]
    return Chapter("four packages", "one model through four packages", rows_shown, "", [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=10, help="of tuning on the full graph")
    options.add_argument("--work", type=Path, metavar="FOLDER", help="train as a worker of the job")
    args = options.parse_args()
    if args.work:
        work(args.work)
    else:
        finish([run(args.epochs)], args.report)
