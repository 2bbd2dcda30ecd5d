"""Plans: what they choose, refuse, say and save; caches; sampler freshness."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core_kernels import Graph, datasets, ops, partition_graph
from core_kernels.comm import Group
from core_kernels.errors import ArgumentError
from core_kernels.interconnect import Interconnect
from gnn_parallel import (
    Engine,
    InputError,
    Plan,
    PlanMismatchError,
    UnsupportedLayerError,
    WholeLayer,
    plan,
    split_layer,
)
from gnn_parallel.cache import choose_cached, expected_reads
from gnn_parallel.cost_model import Prices, Rates, estimate_step_seconds
from gnn_parallel.counts import StepCounts
from gnn_parallel.dropout import keyed_dropout, sampling_step
from gnn_parallel.dry_run import BUDGET_SHARE
from gnn_parallel.loader import BatchSchedule, share_seeds
from gnn_parallel.models import make_model
from gnn_parallel.traffic import LayerShape
from gnn_parallel.trial import Entry, _Trial

RATES = Rates(5e-9, 1e-10, 1e-11, 1e-10, 5e-9, 1e-3)


def make(problem, num_parts=3, hidden=8, **options):
    model = make_model("sage", problem.features.shape[1], hidden, 3, 2, dtype=problem.features.dtype)
    arguments = {
        "features": problem.features,
        "partition": partition_graph(problem.graph, num_parts, "random", seed=1),
        "fanouts": problem.fanouts,
        "batch_size": problem.batch_size,
        "seeds": problem.seeds,
        "rates": RATES,
        "interconnect": Interconnect.preset("ethernet-1gbit"),
    }
    return plan(problem.graph, model, **(arguments | options)), model


def test_the_cheapest_strategy_is_chosen_and_explained(problem):
    made, _ = make(problem)
    cheapest = min(made.candidates, key=lambda candidate: candidate.predicted_seconds)
    assert made.strategy == cheapest.strategy == "gdp"
    text = made.explain()
    for name in ("gdp", "nfp", "snp", "dnp", "sample", "load", "shuffle", "compute", "reduce", "next best"):
        assert name in text


def test_a_slow_link_to_sharded_features_changes_the_choice():
    generator = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(0, 400, (2, 4000), generator=generator), 400)
    model = make_model("sage", 512, 8, 3, 2)
    made = plan(
        graph,
        model,
        features=torch.randn(400, 512, generator=generator),
        partition=partition_graph(graph, 4, "random"),
        fanouts=[5, 5],
        batch_size=64,
        placement="sharded",
        rates=RATES,
        interconnect=Interconnect.preset("ethernet-1gbit"),
        group_shape="4x1",
    )
    assert made.strategy in ("snp", "nfp")
    assert made.predicted.predicted_seconds < 0.7 * made.candidate("gdp").predicted_seconds


def test_a_saved_plan_is_bound_to_the_data_it_was_made_for(problem, tmp_path):
    made, model = make(problem, num_parts=1)
    loaded = Plan.load(made.save(tmp_path / "plan.json"))
    assert loaded == made
    with pytest.raises(PlanMismatchError, match=r"plan\.bind"):
        Engine(loaded, model)
    book = partition_graph(problem.graph, 1)
    Engine(loaded.bind(problem.graph, problem.features, book, problem.seeds), model)
    with pytest.raises(PlanMismatchError, match="made for graph"):
        loaded.bind(problem.graph.symmetrized(), problem.features, book)
    with pytest.raises(PlanMismatchError, match="2 parts; expected world_size=1"):
        loaded.bind(problem.graph, problem.features, partition_graph(problem.graph, 2, "random"))
    (tmp_path / "other.json").write_text('{"schema": "something.else"}')
    with pytest.raises(ArgumentError, match="schema"):
        Plan.load(tmp_path / "other.json")


def test_an_engine_refuses_another_number_of_ranks(problem):
    made, model = make(problem, num_parts=3)
    with pytest.raises(PlanMismatchError, match="world_size=3"):
        Engine(made, model)


def test_wrong_widths_and_types_are_refused(problem):
    made, _ = make(problem, num_parts=1)
    with pytest.raises(InputError, match="9 columns"):
        Engine(made, make_model("sage", 9, 8, 3, 2, dtype=torch.float64))
    with pytest.raises(InputError, match="float64"):
        Engine(made, make_model("sage", 7, 8, 3, 2))


class Median(nn.Module):
    """A layer nobody can merge."""

    in_channels, out_channels = 7, 7

    def split_layer(self, graph):
        return WholeLayer(lambda graph, x, num_rows: x[:num_rows], 7, 7, "a median has no mergeable state")


def test_a_layer_without_a_mergeable_state_gets_gdp_and_dnp_and_the_plan_says_why(problem):
    made, _ = make(problem)
    book = partition_graph(problem.graph, 3, "random", seed=1)
    made = plan(
        problem.graph,
        nn.Sequential(Median(), nn.Linear(7, 3)),
        features=problem.features,
        partition=book,
        fanouts=[3],
        batch_size=18,
        rates=RATES,
    )
    assert made.strategy in ("gdp", "dnp")
    assert made.explain().count("a median has no mergeable state") == 2
    with pytest.raises(UnsupportedLayerError, match="no adapter"):
        split_layer(nn.Linear(3, 3), problem.graph)


def test_memory_limits_are_reported_per_strategy(problem):
    made, _ = make(problem, batch_size=2)
    needed = {candidate.strategy: candidate.memory_bytes for candidate in made.candidates}
    limited, _ = make(problem, batch_size=2, memory_bytes=needed["nfp"])
    assert limited.strategy == "nfp"
    assert "memory per rank" in limited.candidate("gdp").reason


def test_counting_stops_when_the_choice_is_clear(problem):
    costly = dataclasses.replace(RATES, upper_seconds_per_step=1.0, read_seconds_per_byte=1e-3)
    clear, _ = make(problem, batch_size=2, rates=costly)
    assert 3 <= clear.num_steps_sampled < clear.steps_per_epoch
    unclear, _ = make(problem, batch_size=2, rates=costly, interconnect=None, num_parts=1)
    assert unclear.num_steps_sampled == 16  # one rank: all strategies are the same


def test_counting_takes_at_most_its_share_of_an_epoch(problem):
    quick = Rates(0.0, 0.0, 0.0, 0.0, 0.0, 1e-6)
    made, _ = make(problem, batch_size=2, rates=quick, interconnect=None)
    assert made.num_steps_sampled == 1  # one round is counted in any case
    slow = dataclasses.replace(quick, upper_seconds_per_step=0.05)
    made, _ = make(problem, batch_size=2, rates=slow, interconnect=None, num_parts=1)
    assert made.num_steps_sampled > 1
    assert made.counting_seconds <= BUDGET_SHARE * made.predicted.predicted_seconds


def estimate(strategy, is_early, contention=1.0):
    """Return the predicted step of four ranks that fetch 1,000 rows each, at one second per megabyte."""
    counts = StepCounts.zeros(4)
    counts.fetch_gdp[:] = 1000 * (1 - torch.eye(4)) / 3
    counts.destinations[:], counts.edges[:] = 100, 1000
    shape = LayerShape("mean", 256, 8, 8, 8, 0, False, False, True, False, True, 4, 4, 4, 1000, 500, "sharded")
    rates = Rates(1e-4, 0.0, 0.0, 0.0, 0.0, 0.2, contention=contention)
    price = lambda collective, num_bytes: num_bytes / 1e6  # noqa: E731
    return estimate_step_seconds(strategy, counts, shape, rates, Prices(price, price, price), is_early)


def test_background_preparation_hides_the_shorter_half_of_a_step():
    one_by_one, early = estimate("gdp", False), estimate("gdp", True)
    fetched = 1000 * (256 * 4 + 4) / 1e6  # and 24 bytes of sizes
    assert one_by_one.total == pytest.approx(0.1 + 0.2 + fetched + one_by_one.reduce, rel=1e-3)
    assert early.total == pytest.approx(0.1 + fetched, rel=1e-3)  # preparing is the longer half
    assert early.compute == pytest.approx(0.2)
    assert estimate("gdp", True, contention=10.0).total == pytest.approx(10 * 0.3, rel=1e-3)


def make_trial(problem, budget_share, seconds_of_strategy):
    """Return a trial whose bursts take what they are told, and the plan it is for."""
    made, model = make(problem, batch_size=1)
    made = dataclasses.replace(made, counting_seconds=0.0).with_data(made.data)
    step = made.predicted.predicted_seconds / made.steps_per_epoch
    trial = _Trial(dataclasses.replace(made, num_epochs=1).with_data(made.data), model, Group.single(), budget_share)

    def burst(entry, num_steps=2, is_counted=True):
        trial.spent_seconds += num_steps * step * seconds_of_strategy[entry.candidate.strategy]
        if is_counted:
            entry.bursts.append(step * seconds_of_strategy[entry.candidate.strategy])

    def enter(candidate):
        entry = Entry(candidate)
        trial._runners[id(entry)] = SimpleNamespace(close=lambda: None), iter(())
        return entry

    trial._burst, trial._enter, trial._note = burst, enter, lambda elapsed: elapsed
    return trial, step, made


def test_a_trial_never_spends_more_than_its_share_of_measured_epochs(problem):
    times = {"gdp": 1.0, "nfp": 0.9, "snp": 1.4, "dnp": 1.3}
    tried = {}
    for share in (0.01, 0.3, 1.0, 50.0):
        trial, step, made = make_trial(problem, share, times)
        trial.run(num_bursts=20)
        best = min((times[entry.candidate.strategy] for entry in trial.entries), default=1.0)
        budget = share * made.steps_per_epoch * best * step
        assert trial.spent_seconds == 0 or made.counting_seconds + trial.spent_seconds <= budget
        tried[share] = [entry.candidate.strategy for entry in trial.entries]
    assert tried[0.01] == []
    assert set(tried[50.0]) == set(times)
    assert tried[50.0][: len(tried[1.0])] == tried[1.0]  # the best predictions first


def test_strategies_that_have_fallen_behind_are_not_tried_further(problem):
    trial, _, _ = make_trial(problem, 1e6, {"gdp": 1.0, "nfp": 1.05, "snp": 3.0, "dnp": 1.4})
    trial.run(num_bursts=20)
    bursts = {entry.candidate.strategy: len(entry.bursts) for entry in trial.entries}
    assert bursts == {"gdp": 5, "nfp": 5, "snp": 1, "dnp": 2}


def test_spoilt_bursts_do_not_put_a_strategy_out_of_the_race(problem):
    spoilt = {"nfp": [1.6]}  # its first burst; then it is the fastest
    times = {"gdp": 1.0, "nfp": 0.95, "snp": 3.0, "dnp": 3.0}
    trial, step, _ = make_trial(problem, 1e6, times)
    told = trial._burst

    def burst(entry, num_steps=2, is_counted=True):
        told(entry, num_steps, is_counted)
        queue = spoilt.get(entry.candidate.strategy)
        if is_counted and queue:
            entry.bursts[-1] = step * queue.pop()

    trial._burst = burst
    trial.run(num_bursts=20)
    assert min(trial.entries, key=lambda entry: entry.step_seconds).candidate.strategy == "nfp"


def test_hosts_work_data_parallel_where_the_network_is_slow():
    generator = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(0, 400, (2, 4000), generator=generator), 400)
    made = plan(
        graph,
        make_model("sage", 512, 8, 3, 2),
        features=torch.randn(400, 512, generator=generator),
        partition=partition_graph(graph, 4, "random"),
        fanouts=[5, 5],
        batch_size=64,
        placement="sharded",
        rates=RATES,
        interconnect=Interconnect.preset("ethernet-100mbit"),
        look_ahead=0,
        group_shape="2x2",
    )
    assert made.num_hosts == 2
    assert "on 2 hosts that work data-parallel" in made.explain()
    flat = min(c.predicted_seconds for c in made.candidates if c.num_hosts == 1)
    assert made.predicted.predicted_seconds < flat
    needed = [made.candidate("gdp", hosts).memory_bytes for hosts in (1, 2)]
    assert needed[0] < needed[1]  # every host holds all features


def test_ranks_that_do_not_pay_are_advised_against(problem):
    slow = {"interconnect": Interconnect.preset("ethernet-100mbit"), "group_shape": "4x1"}
    made, _ = make(problem, num_parts=4, hidden=4096, **slow)
    assert made.recommended_ranks == 1
    assert "use fewer ranks: gdp on 1 is predicted" in made.explain()
    heavy = dataclasses.replace(RATES, read_seconds_per_byte=1e-4)
    worth, _ = make(problem, num_parts=4, rates=heavy, **slow)
    assert worth.recommended_ranks == 4
    assert "use fewer ranks" not in worth.explain()


def test_ranks_that_share_cores_slow_each_other_down(problem):
    shared = dataclasses.replace(RATES, contention=3.0)
    alone, crowded = make(problem, interconnect=None)[0], make(problem, interconnect=None, rates=shared)[0]
    ratio = crowded.predicted.seconds["compute"] / alone.predicted.seconds["compute"]
    assert 2.5 < ratio < 3.5
    assert shared.shared_by(1, 3).contention == 1.0


def test_batches_that_follow_clusters_read_fewer_rows():
    data = datasets.sbm(2000, num_classes=20, average_degree=10, num_features=16, seed=1)
    common = {
        "features": data.features,
        "partition": partition_graph(data.graph, 1),
        "fanouts": [5, 5],
        "batch_size": 50,
        "strategy": "gdp",
        "measure": False,
    }
    engines = {}
    for clusters in (0, 40):
        model = make_model("sage", 16, 8, 20, 2)
        engines[clusters] = Engine(plan(data.graph, model, num_clusters=clusters, **common), model)
    batches = {clusters: list(engine.loader(torch.arange(2000))) for clusters, engine in engines.items()}
    seeds = torch.cat([batch.seeds for batch in batches[40]])
    assert sorted(seeds.tolist()) == list(range(2000))
    rows = {c: sum(len(torch.unique(batch.work.sources)) for batch in found) for c, found in batches.items()}
    assert rows[40] < 0.6 * rows[0]
    assert "not drawn independently" in engines[40].plan.explain()


def is_fresh(sample):
    """Whether samples differ between steps, between layers, and between seeds of the generator."""
    reference = sample(seed=1, step=0, layer=0)
    return all(
        not torch.equal(reference, sample(**({"seed": 1, "step": 0, "layer": 0} | change)))
        for change in ({"step": 1}, {"layer": 1}, {"seed": 2})
    ) and torch.equal(reference, sample(seed=1, step=0, layer=0))


def test_samples_are_fresh_and_a_constant_sampler_seed_is_caught(problem):
    seeds = torch.arange(60)
    assert is_fresh(lambda **keys: ops.sample_neighbors(problem.graph, seeds, 2, **keys)[1])
    assert not is_fresh(lambda **keys: ops.sample_neighbors(problem.graph, seeds, 2, seed=7777777)[1])


def test_dropout_is_keyed_by_node_and_step():
    x, nodes = torch.ones(200, 65), torch.arange(200)
    with sampling_step(seed=1, step=5):
        first = keyed_dropout(x, nodes, 0.3, layer=0)
        assert torch.equal(first.flip(0), keyed_dropout(x, nodes.flip(0), 0.3, layer=0))
    with sampling_step(seed=1, step=6):
        assert not torch.equal(first, keyed_dropout(x, nodes, 0.3, layer=0))
    assert first.mean() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(keyed_dropout(x, nodes, 0.3, 0, training=False), x)
    with pytest.raises(InputError, match=r"p=1\.5"):
        keyed_dropout(x, nodes, 1.5, layer=0)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_cached_rows_hit_nearly_as_often_as_the_best_static_set(share):
    generator = torch.Generator().manual_seed(0)
    popular = (torch.rand(20_000, generator=generator) ** 3 * 2000).long()
    graph = Graph.from_edge_index(torch.stack([popular, torch.randint(0, 2000, (20_000,), generator=generator)]), 2000)
    seeds = torch.arange(0, 2000, 3)
    owner = torch.arange(2000) % 2
    reads = torch.zeros(2000)
    schedule = BatchSchedule(seeds, 128)
    for step, batch in enumerate([batch for epoch in range(20) for batch in schedule.batches(epoch)]):
        mine = share_seeds(batch, owner, 2)[0]
        remote = ops.sample_blocks(graph, mine, [5, 5], step=step)[0].src_ids
        reads[remote[owner[remote] == 1]] += 1
    num_rows = int(share * 2000)
    best = reads.topk(num_rows).values.sum()
    hotness = expected_reads(graph, owner, 0, seeds, (5, 5), "gdp")
    chosen = reads[choose_cached(hotness, owner, 0, num_rows)].sum()
    assert chosen / best >= 0.97


def test_one_rank_needs_no_interconnect_and_costs_no_traffic(problem):
    made, _ = make(problem, num_parts=1, interconnect=None)
    assert all(candidate.bytes == 0 for candidate in made.candidates)
    assert dataclasses.asdict(made.predicted)["seconds"]["shuffle"] == 0
