"""Hosts that work data-parallel, batch reuse, disk tiers, mixed precision: same numbers, counted bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from core_kernels import datasets, partition_graph
from gnn_parallel import Engine, plan
from gnn_parallel.cost_model import Rates
from gnn_parallel.exchange import TAGS
from gnn_parallel.models import make_model
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.verify import compare, run_reference, run_strategy

pytestmark = pytest.mark.distributed


def build(problem, layer="sage"):
    options = {"heads": 2, "dropout": 0.3, "seed": 5, "dtype": problem.features.dtype}
    return make_model(layer, problem.features.shape[1], 6, 3, len(problem.fanouts), **options)


def compare_options(group, problem, cases):
    """Return per case the largest difference to one process."""
    common = (problem.features, problem.labels)
    shape = (problem.seeds, problem.fanouts, problem.batch_size, 3)
    book = partition_graph(problem.graph, group.size, "metis", seed=1)
    found = {}
    for layer, strategy, options in cases:
        expected = run_reference(problem.graph, build(problem, layer), *common, *shape) if group.rank == 0 else []
        group.barrier()  # rank 0 has compiled the kernels for the others
        case = (group, strategy, problem.graph, build(problem, layer), *common, book, *shape)
        results, _ = run_strategy(*case, **options)
        if group.rank == 0:
            found[layer, strategy, str(options)] = compare(results, expected).largest
    return found


def test_two_hosts_of_two_ranks_agree_with_one_process(four_ranks, two_way_problem):
    cases = [
        (layer, strategy, {"num_hosts": 2, **options})
        for layer, options in (("sage", {}), ("gat", {"placement": "sharded"}), ("gcn", {"placement": "sharded"}))
        for strategy in STRATEGIES
    ]
    differences = four_ranks.run(compare_options, two_way_problem, cases)[0]
    assert max(differences.values()) < 1e-10, differences


def forget_other_hosts(group, problem):
    """Leave out the sum over hosts that the columns of NFP need."""
    from gnn_parallel.parameters import SpreadParameters

    kept = SpreadParameters._sum
    SpreadParameters._sum = lambda self, parameters, columns: kept(self, parameters if columns is None else [], None)
    try:
        return compare_options(group, problem, [("sage", "nfp", {"num_hosts": 2})])
    finally:
        SpreadParameters._sum = kept


def test_columns_that_are_not_summed_over_hosts_are_caught(four_ranks, two_way_problem):
    assert max(four_ranks.run(forget_other_hosts, two_way_problem)[0].values()) > 1e-3


def count_bytes(group, problem, options):
    """Return per strategy predicted and counted bytes by tag, of an epoch of which every step was counted."""
    book = partition_graph(problem.graph, group.size, "metis", seed=1)
    found = {}
    for strategy in STRATEGIES:
        model = build(problem)
        arguments = {"fanouts": problem.fanouts, "batch_size": problem.batch_size, "seeds": problem.seeds}
        made = plan(
            problem.graph,
            model,
            features=problem.features,
            partition=book,
            strategy=strategy,
            num_steps=100,
            measure=False,
            group=group,
            **arguments,
            **options,
        )
        engine = Engine(made, model, group)
        before = engine.ranks.sent_bytes()
        for batch in engine.loader(problem.seeds, problem.labels):
            engine.backward(F.cross_entropy(engine(batch), batch.y))
        after = engine.ranks.sent_bytes()
        reused = getattr(engine.features, "rows_reused", 0)
        counted = {tag: after.get(tag, 0) - before.get(tag, 0) for tag in TAGS}
        found[strategy] = (made.predicted.bytes_by_tag, counted, made.predicted.overlap_rows, reused)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"num_hosts": 2, "placement": "sharded"},
        {"placement": "sharded", "reuse": True, "cache": "10%"},
        {"placement": "sharded", "is_mixed": True},
    ],
)
def test_counted_bytes_equal_the_formula(four_ranks, two_way_problem, options):
    ranks = four_ranks.run(count_bytes, two_way_problem, options)
    for strategy in STRATEGIES:
        counted = {tag: sum(rank[strategy][1][tag] for rank in ranks) for tag in TAGS}
        assert counted == ranks[0][strategy][0], strategy
    if options.get("reuse"):
        for strategy in ("gdp", "dnp"):
            overlap, reused = ranks[0][strategy][2], sum(rank[strategy][3] for rank in ranks)
            assert reused >= 0.98 * overlap > 0


def test_rows_of_the_batch_before_are_not_fetched_again_and_nothing_changes(four_ranks, two_way_problem):
    options = {"placement": "sharded", "reuse": True}
    cases = [("sage", strategy, options) for strategy in STRATEGIES]
    assert max(four_ranks.run(compare_options, two_way_problem, cases)[0].values()) < 1e-10
    plain = four_ranks.run(count_bytes, two_way_problem, {"placement": "sharded"})[0]
    kept = four_ranks.run(count_bytes, two_way_problem, options)[0]
    assert kept["gdp"][0]["features"] < plain["gdp"][0]["features"]


def train_from_disk(group, problem, path):
    """Return differences to one process, and rows read from disk beside those that were predicted."""
    book = partition_graph(problem.graph, group.size, "metis", seed=1)
    model = build(problem)
    made = plan(
        problem.graph,
        model,
        features=path,
        partition=book,
        fanouts=problem.fanouts,
        batch_size=problem.batch_size,
        seeds=problem.seeds,
        strategy="gdp",
        placement="disk",
        cache="20%",
        num_steps=100,
        rates=Rates(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, disk_seconds_per_byte=1.0),
        measure=False,
        group=group,
    )
    engine = Engine(made, model, group)
    for batch in engine.loader(problem.seeds, problem.labels):
        model.zero_grad()
        engine.backward(F.cross_entropy(engine(batch), batch.y))
    gradients = engine.gradients()
    rows = engine.features.store.counters.rows
    engine.close()
    plain = run_reference(
        problem.graph,
        build(problem),
        problem.features,
        problem.labels,
        problem.seeds,
        problem.fanouts,
        problem.batch_size,
        made.steps_per_epoch,
        learning_rate=0.0,
    )[-1].gradients
    difference = max(float((gradients[name] - value).abs().max()) for name, value in plain.items())
    reasons = {name: made.candidate(name).reason for name in ("nfp", "snp")}
    return difference, rows, made.predicted.seconds["load"], reasons


def test_features_on_disk_give_the_same_numbers_and_the_predicted_reads(four_ranks, two_way_problem, tmp_path):
    path = tmp_path / "features.npy"
    np.save(path, two_way_problem.features.numpy())
    ranks = four_ranks.run(train_from_disk, two_way_problem, str(path))
    assert max(rank[0] for rank in ranks) < 1e-10
    assert all(rank[1]["host"] > 0 and rank[1]["reused"] > 0 for rank in ranks)
    row_bytes = two_way_problem.features.shape[1] * 8
    largest = max(rank[1]["disk"] for rank in ranks) * row_bytes
    assert 0.5 * ranks[0][2] <= largest <= 1.001 * ranks[0][2]  # the step of the slowest rank, not its sum, is priced
    assert "disk" in ranks[0][3]["nfp"]
    assert "disk" in ranks[0][3]["snp"]


def train_mixed(group, layer, strategy, is_mixed):
    data = datasets.sbm(600, num_classes=4, num_features=32, feature_signal=1.0, seed=2)
    ids = torch.arange(0, 600, 2)
    model = make_model(layer, 32, 16, 4, 2, heads=2, seed=3)
    made = plan(
        data.graph,
        model,
        features=data.features,
        partition=partition_graph(data.graph, group.size, "random"),
        fanouts=[5, 5],
        batch_size=100,
        seeds=ids,
        strategy=strategy,
        is_mixed=is_mixed,
        measure=False,
        group=group,
    )
    engine, losses = Engine(made, model, group), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        for batch in engine.loader(ids, data.labels, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(engine(batch), batch.y)
            engine.backward(loss)
            optimizer.step()
            losses.append(float(group.all_reduce(loss.detach() * batch.share, tag="loss")))
    return losses, engine.evaluate(torch.arange(1, 600, 2), data.labels)


@pytest.mark.parametrize(("layer", "strategy"), [*(("sage", name) for name in STRATEGIES), ("gatv2", "snp")])
def test_mixed_precision_stays_close_and_learns(four_ranks, layer, strategy):
    full, accuracy = four_ranks.run(train_mixed, layer, strategy, False)[0]
    mixed, mixed_accuracy = four_ranks.run(train_mixed, layer, strategy, True)[0]
    assert mixed[0] != full[0]
    assert mixed[0] == pytest.approx(full[0], rel=0.02)
    assert mixed_accuracy > 0.9 * accuracy > 0.8
