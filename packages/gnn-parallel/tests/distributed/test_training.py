"""What users need around the step: uneven batches, clipping, checkpoints across strategies, failures, evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from core_kernels import launch, partition_graph
from core_kernels.interconnect import Interconnect
from core_kernels.testing import FaultPlan
from gnn_parallel import Engine, Plan, plan
from gnn_parallel.models import make_model
from gnn_parallel.strategies import STRATEGIES

pytestmark = pytest.mark.distributed


def make_engine(group, problem, strategy, batch_size=18, num_parts=None, **options):
    model = make_model("sage", problem.features.shape[1], 6, 3, 2, seed=5, dtype=problem.features.dtype)
    book = partition_graph(problem.graph, num_parts or group.size, "random", seed=1)
    made = plan(
        problem.graph,
        model,
        features=problem.features,
        partition=book,
        fanouts=problem.fanouts,
        batch_size=batch_size,
        seeds=problem.seeds,
        strategy=strategy,
        measure=False,
        group=group,
        **options,
    )
    return Engine(made, model, group)


def train(engine, problem, optimizer, epochs, clip=None):
    norms = []
    for epoch in epochs:
        for batch in engine.loader(problem.seeds, problem.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            if clip is not None:
                norms.append(engine.clip_grad_norm_(clip))
            optimizer.step()
    return norms


def train_with_clipping(group, problem):
    found = {}
    for strategy in STRATEGIES:
        engine = make_engine(group, problem, strategy, batch_size=7)
        norms = train(engine, problem, torch.optim.Adam(engine.model.parameters(), lr=0.01), range(2), clip=0.05)
        found[strategy] = (norms, engine.state_dict())
    return found


def test_uneven_batches_and_clipping_agree_over_strategies(four_ranks, problem):
    found = four_ranks.run(train_with_clipping, problem)[0]
    norms, weights = found["gdp"]
    assert len(norms) == 2 * -(-len(problem.seeds) // 7)
    assert max(norms) > 0.05
    for strategy in ("nfp", "snp", "dnp"):
        assert found[strategy][0] == pytest.approx(norms, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(found[strategy][1][name], weight, rtol=1e-8, atol=1e-9)


_subgroups = {}


def checkpoint_under_one_resume_under_another(group, problem):
    """Train two epochs under GDP; and one under NFP on four ranks, one under SNP on two."""
    engine = make_engine(group, problem, "gdp")
    train(engine, problem, torch.optim.Adam(engine.model.parameters(), lr=0.01), range(2))
    expected = engine.state_dict()

    engine = make_engine(group, problem, "nfp")
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    train(engine, problem, optimizer, range(1))
    weights, moments = engine.state_dict(), engine.optimizer_state_dict(optimizer)
    if group.rank > 1:
        return None
    pair = _subgroups.setdefault(2, group.subgroup([0, 1]))
    engine = make_engine(pair, problem, "snp")
    engine.model.load_state_dict(weights)
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    optimizer.load_state_dict(moments)
    train(engine, problem, optimizer, range(1, 2))
    found = engine.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def test_a_checkpoint_resumes_under_another_strategy_and_number_of_ranks(four_ranks, problem):
    assert four_ranks.run(checkpoint_under_one_resume_under_another, problem)[0] < 1e-9


def evaluate(group, problem):
    nodes = torch.arange(problem.graph.num_nodes)
    return {s: make_engine(group, problem, s).evaluate(nodes, problem.labels) for s in STRATEGIES}


def test_evaluation_with_all_neighbours_agrees_with_the_full_graph(four_ranks, problem):
    model = make_model("sage", problem.features.shape[1], 6, 3, 2, seed=5, dtype=problem.features.dtype).eval()
    full = model([problem.graph, problem.graph], problem.features).argmax(1)
    expected = float((full == problem.labels).double().mean())
    found = four_ranks.run(evaluate, problem)[0]
    assert found == pytest.approx(dict.fromkeys(STRATEGIES, expected))


def plan_with_trials(group, problem):
    """Return a measured plan, and whether the model was left as it was."""
    model = make_model("sage", problem.features.shape[1], 6, 3, 2, seed=5, dtype=problem.features.dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = plan(
        problem.graph,
        model,
        features=problem.features,
        partition=partition_graph(problem.graph, group.size, "random", seed=1),
        fanouts=problem.fanouts,
        batch_size=2,
        seeds=problem.seeds,
        interconnect=Interconnect.preset("loopback-cpu"),
        num_epochs=100_000,
        group=group,
    )
    is_same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return made.to_json(), is_same and all(p.grad is None for p in model.parameters())


def test_close_strategies_are_tried_before_the_choice(four_ranks, problem):
    ranks = four_ranks.run(plan_with_trials, problem)
    assert all(rank[1] for rank in ranks)
    made = [Plan.from_json(rank[0]) for rank in ranks]
    assert len({(p.strategy, p.calibration) for p in made}) == 1
    tried = [c for c in made[0].candidates if c.measured_step_seconds]
    assert made[0].predicted in tried
    assert made[0].trial_seconds > 0
    steps = made[0].steps_per_epoch
    for candidate in tried:
        assert candidate.predicted_seconds == pytest.approx(candidate.measured_step_seconds * steps)
    assert "per step; computing took" in made[0].explain()


def train_ahead(group, problem, look_ahead):
    """Return weights after two epochs of every strategy, evaluating while batches are prepared."""
    found = {}
    for strategy in STRATEGIES:
        options = {"placement": "sharded", "cache": "10%", "reuse": True, "look_ahead": look_ahead}
        engine = make_engine(group, problem, strategy, **options)
        optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
        train(engine, problem, optimizer, range(1))
        for step, batch in enumerate(engine.loader(problem.seeds, problem.labels, epoch=1)):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()
            if step == 1:
                found[strategy, "accuracy"] = torch.tensor(engine.evaluate(problem.seeds, problem.labels))
                break  # leaves batches that nobody takes
        found |= {(strategy, name): value for name, value in engine.state_dict().items()}
        engine.close()
    return found


def test_batches_prepared_in_the_background_change_no_bit(four_ranks, problem):
    plain, ahead = (four_ranks.run(train_ahead, problem, number)[0] for number in (0, 2))
    assert plain.keys() == ahead.keys()
    assert all(torch.equal(value, ahead[name]) for name, value in plain.items())


def train_an_epoch(group, problem):
    engine = make_engine(group, problem, "snp", placement="sharded")
    train(engine, problem, torch.optim.SGD(engine.model.parameters(), lr=0.01), range(3))


def test_a_rank_killed_mid_epoch_ends_the_job_and_is_named(problem):
    with pytest.raises(launch.RankFailedError, match="rank 1"):
        launch.run_ranks(train_an_epoch, 2, problem, timeout_seconds=10, faults=FaultPlan.kill(1, step=2))
