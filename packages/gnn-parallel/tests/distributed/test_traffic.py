"""Bytes counted by the group equal the plan's formulas, tag by tag, to the byte."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from core_kernels import partition_graph
from gnn_parallel import Engine, plan
from gnn_parallel.exchange import TAGS
from gnn_parallel.models import make_model
from gnn_parallel.strategies import STRATEGIES

pytestmark = pytest.mark.distributed


def count_epoch(group, problem, layer, placement, cache):
    """Return per strategy the predicted bytes per tag and this rank's counted bytes."""
    book = partition_graph(problem.graph, group.size, "metis", seed=1)
    found = {}
    for strategy in STRATEGIES:
        model = make_model(layer, problem.features.shape[1], 2, 3, 2, heads=2, dtype=problem.features.dtype)
        made = plan(
            problem.graph,
            model,
            features=problem.features,
            partition=book,
            fanouts=problem.fanouts,
            batch_size=problem.batch_size,
            seeds=problem.seeds,
            strategy=strategy,
            placement=placement,
            cache=cache,
            num_steps=100,
            measure=False,
            group=group,
        )
        assert made.num_steps_sampled == made.steps_per_epoch
        engine = Engine(made, model, group)
        before = {tag: group.counters.sent(tag) for tag in TAGS}
        for batch in engine.loader(problem.seeds, problem.labels):
            engine.backward(F.cross_entropy(engine(batch), batch.y))
        counted = {tag: group.counters.sent(tag) - before[tag] for tag in TAGS}
        found[strategy] = (made.predicted.bytes_by_tag, counted)
    return found


@pytest.mark.parametrize(
    ("layer", "placement", "cache"),
    [
        ("sage", "replicated", 0),
        ("gin", "replicated", 0),
        ("gat", "replicated", 0),
        ("gatv2", "sharded", 0),
        ("sage", "sharded", 0),
        ("sage", "sharded", "10%"),
        ("gcn", "sharded", "10%"),
    ],
)
def test_counted_bytes_equal_the_formula(four_ranks, two_way_problem, layer, placement, cache):
    ranks = four_ranks.run(count_epoch, two_way_problem, layer, placement, cache)
    for strategy in STRATEGIES:
        predicted = ranks[0][strategy][0]
        counted = {tag: sum(rank[strategy][1][tag] for rank in ranks) for tag in TAGS}
        assert counted == predicted, strategy
    if placement == "sharded":
        assert ranks[0]["gdp"][0]["features"] > 0


def test_a_cache_saves_traffic(four_ranks, two_way_problem):
    plain = four_ranks.run(count_epoch, two_way_problem, "sage", "sharded", 0)[0]
    cached = four_ranks.run(count_epoch, two_way_problem, "sage", "sharded", "30%")[0]
    assert cached["gdp"][0]["features"] < 0.8 * plain["gdp"][0]["features"]
    assert cached["snp"][0]["activations"] < plain["snp"][0]["activations"]


def test_raw_states_travel_without_gradients(four_ranks, two_way_problem):
    two_way_problem.features = two_way_problem.features[:, :3].contiguous()  # fewer columns than ranks, too
    snp = four_ranks.run(count_epoch, two_way_problem, "sage", "replicated", 0)[0]["snp"][0]
    assert snp["activations"] > 0
    assert snp["activation_gradients"] == 0
