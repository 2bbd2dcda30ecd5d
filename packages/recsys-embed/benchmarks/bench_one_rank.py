"""One rank: processor time of a step through the collection and through plain embedding bags, same optimiser.

Two baselines: core-kernels' bag and fused update on one joined table; PyTorch's ``nn.EmbeddingBag(sparse=True)`` per
table with ``torch.optim``; both produce the concatenated pooled rows and take the same gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from core_kernels.comm import Group
from core_kernels.ops import embedding_bag, fused_optimizers
from recsys_embed import SGD, KeyedJaggedTensor, TieredEmbeddingBagCollection
from recsys_embed.data import FieldSpec, make_clicks

WIDTH, BATCH, STEPS = 64, 512, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the medians there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = make_clicks(BATCH * 32, [FieldSpec(f"C{i}", 20_000) for i in range(26)])
    batches = [b.features for b in data.batches(BATCH)]
    tables = data.tables(WIDTH)
    grad = torch.randn(BATCH, 26 * WIDTH) * 1e-3
    systems = {"ours": ours(tables), "fused": fused(tables), "torch": plain_torch(tables)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for step in range(STEPS):
        turn = step % len(systems)  # who comes first finds the gradient out of the cache
        for name, run in [*systems.items()][turn:] + [*systems.items()][:turn]:
            begin = time.process_time()
            run(batches[step % len(batches)]).backward(grad)
            seconds[name].append(time.process_time() - begin)
            if name == "torch":
                begin = time.process_time()
                systems[name].step()
                seconds[name][-1] += time.process_time() - begin
    medians = {name: statistics.median(values[5:]) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:>6}: {value * 1e3:.2f} ms per step, ours takes {medians['ours'] / value:.3f} of it")
    if args.json:
        args.json.write_text(json.dumps({name: {"step_seconds": value} for name, value in medians.items()}, indent=1))


def ours(tables):
    emb = TieredEmbeddingBagCollection(tables, None, SGD(0.05), Group.single())
    return lambda batch: emb(batch).values()


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, weight, ids, offsets):
        ctx.saved = (weight, ids, offsets)
        pooled = embedding_bag(weight, ids, offsets)
        return pooled.view(-1, BATCH, WIDTH).transpose(0, 1).reshape(BATCH, -1)

    @staticmethod
    def backward(ctx, grad):
        weight, ids, offsets = ctx.saved
        rows = grad.view(BATCH, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        fused_optimizers.fused_sgd_(weight, ids, offsets, rows, 0.05)
        return None, None, None, None


def fused(tables):
    starts = torch.tensor([0, *(t.num_embeddings for t in tables)]).cumsum(0)
    weight, anchor = torch.rand(int(starts[-1]), WIDTH), torch.zeros((), requires_grad=True)

    def run(batch: KeyedJaggedTensor):
        ids = batch.values().long() + starts[:-1].repeat_interleave(BATCH)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths().cumsum(0)])
        return Fused.apply(anchor, weight, ids, offsets)

    return run


class PlainTorch:
    def __init__(self, tables):
        self.bags = [nn.EmbeddingBag(t.num_embeddings, WIDTH, mode="sum", sparse=True) for t in tables]
        self.optimizer = torch.optim.SGD([b.weight for b in self.bags], lr=0.05)

    def __call__(self, batch):
        self.optimizer.zero_grad()
        ids, offsets = batch.values().long().view(len(self.bags), -1), torch.arange(BATCH)
        return torch.cat([bag(ids[i], offsets) for i, bag in enumerate(self.bags)], dim=1)

    def step(self):
        self.optimizer.step()


def plain_torch(tables):
    return PlainTorch(tables)


if __name__ == "__main__":
    main()
