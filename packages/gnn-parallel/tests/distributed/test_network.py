"""On hosts joined by slow links: interfaces carry what the group counts, and the plan pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from core_kernels import datasets, partition_graph
from core_kernels.testing import ShapedHosts
from core_kernels.testing.hosts import skip_reason
from gnn_parallel import Engine, Plan, make_model, plan
from gnn_parallel.exchange import TAGS
from gnn_parallel.grid import Grid, run_grid

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
]


def train_an_epoch(group, strategy):
    """Return the bytes this rank sent in the steps of one epoch."""
    data = datasets.sbm(4000, num_classes=4, num_features=256, seed=1)
    seeds = torch.arange(2000)
    model = make_model("sage", 256, 64, 4, 2)
    made = plan(
        data.graph,
        model,
        features=data.features,
        partition=partition_graph(data.graph, group.size, "random"),
        fanouts=[10, 10],
        batch_size=500,
        seeds=seeds,
        strategy=strategy,
        placement="sharded",
        measure=False,
        group=group,
    )
    engine = Engine(made, model, group)
    started = sum(group.counters.sent(tag) for tag in TAGS)
    for batch in engine.loader(seeds, data.labels):
        engine.backward(F.cross_entropy(engine(batch), batch.y))
    return sum(group.counters.sent(tag) for tag in TAGS) - started


def test_interfaces_carry_what_the_group_counts():
    with ShapedHosts([1, 1], link_rate_mbit=1000) as hosts:
        hosts.run(train_an_epoch, "gdp")  # connects
        before, counted = sum(host["sent_bytes"] for host in hosts.link_bytes()), 0
        for strategy in ("gdp", "snp"):
            counted += sum(hosts.run(train_an_epoch, strategy))
        wire = sum(host["sent_bytes"] for host in hosts.link_bytes()) - before
    assert counted > 4e6
    assert 1.0 <= wire / counted <= 1.05


def test_a_cell_of_the_grid_beats_data_parallel_on_a_slow_link():
    small = {
        "hidden": (8,),
        "methods": ("random",),
        "caches": ("0%",),
        "num_nodes": 8000,
        "num_rounds": 3,
        "measure_seconds": 10.0,
    }
    grid = replace(Grid().only(100), **small)
    result = next(iter(run_grid(grid)))
    assert list(run_grid(grid, [result])) == []  # a finished cell is not run again
    assert result["gdp_ratio"] > 2
    assert result["regret"] < 1.5


def plan_on_two_hosts(group):
    """Plan on hosts whose link is slow, measuring everything."""
    data = datasets.sbm(4000, num_classes=4, num_features=512, seed=1)
    made = plan(
        data.graph,
        make_model("sage", 512, 64, 4, 2),
        features=data.features,
        partition=partition_graph(data.graph, group.size, "random"),
        fanouts=[10, 10],
        batch_size=256,
        placement="sharded",
        group_shape="2x2",
        num_epochs=100,
        group=group,
    )
    return made.to_json()


def test_hosts_joined_by_a_slow_link_work_data_parallel():
    with ShapedHosts([2, 2], link_rate_mbit=100) as hosts:
        made = [Plan.from_json(found) for found in hosts.run(plan_on_two_hosts)]
    assert {p.num_hosts for p in made} == {2}
    flat = min(c.predicted_seconds for c in made[0].candidates if c.num_hosts == 1)
    assert made[0].predicted.predicted_seconds < 0.7 * flat
    assert made[0].predicted.measured_step_seconds > 0
