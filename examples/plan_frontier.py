"""autopar: what would more memory buy? The frontier of plans for a film classifier, and one plan trained on two ranks.

python examples/plan_frontier.py --steps 40
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, parser, shown_error

import autopar
from autopar import Cluster, Plan
from core_kernels import datasets, launch
from core_kernels.comm import Group
from core_kernels.console import format_bytes, format_seconds


class Genres(torch.nn.Module):
    """Guesses a film's genre from its title and decade; returns the loss."""

    def __init__(self, width: int, classes: int, hidden: int = 512):
        super().__init__()
        self.up, self.middle = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, hidden)
        self.down = torch.nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.down(self.middle(self.up(x).relu()).relu()), labels)


def read(batch_size: int = 512) -> tuple[list[torch.Tensor], list[torch.Tensor], Genres]:
    """Return batches of films, their genres, and the model, equal on every rank."""
    data = datasets.movielens()
    ids = data.train_mask.nonzero().view(-1)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    parts = ids[: len(ids) // batch_size * batch_size].split(batch_size)
    torch.manual_seed(0)
    # An even number of columns can be split over two devices.
    features = F.pad(data.features, (0, data.num_features % 2)).double()
    model = Genres(features.shape[1], data.num_classes).double()
    return [features[part] for part in parts], [data.labels[part] for part in parts], model


def train(group, plan: Plan, steps: int) -> dict:
    """Train under a plan on one rank."""
    xs, labels, model = read()
    graph = autopar.trace(model, (xs[0], labels[0]))
    parallel = autopar.apply(model, plan, graph, group)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        at = step % len(xs)
        optimizer.zero_grad()
        parallel.groups.reset_counters()
        loss = parallel(xs[at], labels[at])
        loss.backward()
        matches = parallel.groups.counted() == parallel.predicted_collectives()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": parallel.full_tensors(), "matches": matches}


def run(steps: int = 40) -> Chapter:
    """Search for two and for eight devices, then train under the smallest plan for two and compare with one."""
    xs, labels, model = read()
    graph = autopar.trace(model, (xs[0], labels[0]))
    pair = Cluster.preset("loopback-cpu", num_devices=2)
    plan = autopar.search(graph, pair).min_memory()
    wide = autopar.search(graph, Cluster.preset("a100-nvlink-8"), eps=0.02)
    usual = autopar.search_presets(graph, Cluster.preset("a100-nvlink-8"), eps=0.02)
    single = autopar.search(graph, pair.resized(1)).mini_time()

    alone = train(Group.single(), single, steps)
    ranks = launch.run_ranks(train, 2, plan, steps, timeout_seconds=120.0)
    largest = max(float((ranks[0]["parameters"][n] - p).abs().max()) for n, p in alone["parameters"].items())

    marks = {name: (float(p.predicted.memory_bytes), p.seconds) for name, p in usual.items()}
    fastest, smallest = wide.mini_time(), wide.min_memory()
    rows = [
        ("plans on the frontier, 8 devices", str(len(wide))),
        ("fastest", f"{format_seconds(fastest.seconds)} in {format_bytes(fastest.predicted.memory_bytes)}"),
        ("smallest", f"{format_seconds(smallest.seconds)} in {format_bytes(smallest.predicted.memory_bytes)}"),
        (f"largest difference after {steps} steps on 2 ranks", shown_error(largest)),
        ("collectives as predicted", str(all(rank["matches"] for rank in ranks))),
        ("loss, first to last step", f"{ranks[0]['losses'][0]:.2f} to {ranks[0]['losses'][-1]:.2f}"),
    ]
    text = "\n".join(plan.explain().splitlines()[:8])
    return Chapter("autopar", "what would more memory buy", rows, text, [wide.plot(marks=marks)])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=40)
    args = options.parse_args()
    finish([run(args.steps)], args.report)
