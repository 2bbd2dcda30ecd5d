"""Training goes on: under another plan, from a file, under torchrun, and on links instead of nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from core_kernels import datasets, partition_graph
from core_kernels.interconnect import Interconnect
from gnn_parallel import Engine, InputError, cli, load_checkpoint, plan, save_checkpoint
from gnn_parallel.jobs import LabelledGraph
from gnn_parallel.models import make_model
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.training import batch_loss

pytestmark = pytest.mark.distributed

_subgroups: dict[int, object] = {}


def make_engine(group, problem, strategy, hidden=6, seeds=None, **options):
    model = make_model("sage", problem.features.shape[1], hidden, 3, 2, seed=5, dtype=problem.features.dtype)
    arguments = {"fanouts": problem.fanouts, "batch_size": 18, "seeds": problem.seeds if seeds is None else seeds}
    book = partition_graph(problem.graph, group.size, "random", seed=1)
    made = plan(
        problem.graph,
        model,
        features=problem.features,
        partition=book,
        strategy=strategy,
        measure=False,
        group=group,
        **arguments,
        **options,
    )
    return Engine(made, model, group)


def train(engine, problem, optimizer, epochs):
    for epoch in epochs:
        for batch in engine.loader(problem.seeds, problem.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()


def largest_difference(found, expected):
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def follow_other_plans(group, problem):
    """Train three epochs under one strategy, and under one after another; return the difference of the weights."""
    engine = make_engine(group, problem, "gdp")
    train(engine, problem, torch.optim.Adam(engine.model.parameters(), lr=0.01), range(3))
    expected = engine.state_dict()
    engine = make_engine(group, problem, "nfp")
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    for epoch, (strategy, hosts) in enumerate([("nfp", 1), ("snp", 2), ("nfp", 2)]):
        other = make_engine(group, problem, strategy, num_hosts=hosts).plan
        engine = engine.follow(other, optimizer)
        train(engine, problem, optimizer, [epoch])
    return largest_difference(engine.state_dict(), expected)


def test_training_goes_on_under_another_plan(four_ranks, problem):
    assert four_ranks.run(follow_other_plans, problem)[0] < 1e-9


def resume_from_a_file(group, problem, path):
    """Train one epoch under NFP on four ranks, one more from the file under DNP on two; compare with GDP throughout."""
    engine = make_engine(group, problem, "gdp")
    train(engine, problem, torch.optim.Adam(engine.model.parameters(), lr=0.01), range(2))
    expected = engine.state_dict()
    engine = make_engine(group, problem, "nfp")
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    train(engine, problem, optimizer, range(1))
    save_checkpoint(path, engine, optimizer, epoch=1)
    if group.rank > 1:
        return None
    pair = _subgroups.setdefault(2, group.subgroup([0, 1]))
    engine = make_engine(pair, problem, "dnp")
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.5)
    assert load_checkpoint(path, engine, optimizer) == 1
    train(engine, problem, optimizer, range(1, 2))
    return largest_difference(engine.state_dict(), expected)


def test_a_file_resumes_under_another_strategy_and_number_of_ranks(four_ranks, problem, tmp_path):
    path = tmp_path / "run.npz"
    assert four_ranks.run(resume_from_a_file, problem, str(path))[0] < 1e-9
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    with np.load(path, allow_pickle=False) as file:  # no pickle inside
        assert "model/convs.0.lin_l.weight" in file.files


def test_a_checkpoint_of_another_model_or_no_checkpoint_is_refused(problem, tmp_path):
    from core_kernels.comm import Group

    engine = make_engine(Group.single(), problem, "gdp")
    save_checkpoint(tmp_path / "run.npz", engine, torch.optim.Adam(engine.model.parameters()), 1)
    with pytest.raises(InputError, match=r"lin_l\.weight of shape \(9, 7\).*it has \(6, 7\); make the model"):
        load_checkpoint(tmp_path / "run.npz", make_engine(Group.single(), problem, "gdp", hidden=9))
    (tmp_path / "other.npz").write_text("nothing")
    with pytest.raises(InputError, match="a file of save_checkpoint"):
        load_checkpoint(tmp_path / "other.npz", engine)


def predict_links(group, problem, pairs):
    """Return per strategy the losses of two epochs and how often pairs score above negatives."""
    found = {}
    for strategy in STRATEGIES:
        engine = make_engine(group, problem, strategy, seeds=pairs, num_negatives=2)
        optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.02)
        losses = []
        for epoch in range(2):
            for batch in engine.loader(pairs, epoch=epoch):
                optimizer.zero_grad()
                loss = batch_loss(batch, engine(batch))
                engine.backward(loss)
                optimizer.step()
                mine = loss.detach() * batch.share if len(batch.seeds) else loss.detach() * 0
                losses.append(float(group.all_reduce(mine.nan_to_num(), tag="loss")))
        found[strategy] = (losses, engine.evaluate(pairs))
    return found


def test_link_prediction_agrees_over_strategies_and_ranks(four_ranks, problem):
    from core_kernels.comm import Group

    pairs = problem.graph.edge_index()[:, ::9].long()
    alone = predict_links(Group.single(), problem, pairs)["gdp"]
    found = four_ranks.run(predict_links, problem, pairs)[0]
    for strategy in STRATEGIES:
        assert found[strategy][0] == pytest.approx(alone[0], rel=1e-9), strategy
        assert found[strategy][1] == pytest.approx(alone[1])
    assert alone[0][-1] < alone[0][0]


def test_held_out_links_leave_the_graph_in_both_directions():
    data = LabelledGraph.of(datasets.sbm(300, num_classes=4, num_features=9, seed=1)).as_links()
    kept = {tuple(pair) for pair in data.graph.edge_index().T.tolist()}
    for pairs in (data.val_ids, data.test_ids):
        assert pairs.shape[1] > 10
        assert not any((a, b) in kept or (b, a) in kept for a, b in pairs.T.tolist())


def test_torchrun_trains_plans_again_logs_and_saves(tmp_path):
    folder, log, saved, links = (tmp_path / name for name in ("data", "log.jsonl", "run.npz", "links.json"))
    datasets.sbm(300, num_classes=4, num_features=9, seed=1).save(folder)
    Interconnect.preset("loopback-cpu").save(links)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["train", "--dataset", str(folder), "--hidden", "8", "--fanouts", "4,4", "--batch-size", "64"]
    job += ["--trials", "2", "--interconnect", str(links), "--epoch-log", str(log)]
    first = ["--epochs", "2", "--clip", "1", "--validation", "sampled", "--replan-every", "1", "--save", str(saved)]
    done = subprocess.run(
        [*command, "-m", "gnn_parallel.cli", *job, *first],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test accuracy") == 1
    assert cli.main([*job, "--ranks", "1", "--epochs", "3", "--resume", str(saved)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert {"loss", "val_accuracy", "seconds", "bytes_by_tag", "hit_rate", "imbalance", "strategy"} <= lines[0].keys()
    assert lines[2]["loss"] < lines[0]["loss"]
