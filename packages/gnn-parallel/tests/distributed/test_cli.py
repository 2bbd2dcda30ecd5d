"""The command line: exit codes, JSON keys, messages."""

from __future__ import annotations

import json

import pytest

from core_kernels import datasets, partition_graph
from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from gnn_parallel import cli, verify
from gnn_parallel.grid import Grid
from gnn_parallel.jobs import TrainJob
from gnn_parallel.training import train_on_rank


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Settings of every job; an assumed interconnect, since measuring one takes seconds."""
    links = tmp_path_factory.mktemp("links") / "links.json"
    Interconnect.preset("loopback-cpu").save(links)
    return ("--hidden", "8", "--fanouts", "4,4", "--batch-size", "64", "--interconnect", str(links))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small data set as a folder of arrays."""
    path = tmp_path_factory.mktemp("data") / "blocks"
    datasets.sbm(300, num_classes=4, num_features=9, seed=1).save(path)
    return str(path)


@pytest.mark.distributed
def test_train_reports_plan_epochs_and_accuracy(folder, common, tmp_path, capfd):
    pytest.importorskip("matplotlib", reason="--plot needs the plot extra")
    out, plot = tmp_path / "report.json", tmp_path / "report.png"
    arguments = [
        "train",
        "--dataset",
        folder,
        "--ranks",
        "2",
        *common,
        "--epochs",
        "2",
        "--trials",
        "2",
        "--json",
        str(out),
    ]
    assert cli.main([*arguments, "--plot", str(plot)]) == 0
    report = json.loads(out.read_text())
    assert {"strategy", "candidates", "epochs", "test_accuracy", "world_size"} <= report.keys()
    assert report["world_size"] == 2
    assert set(report["candidates"]) == {"gdp", "nfp", "snp", "dnp"}
    assert all({"predicted_seconds", "bytes"} <= c.keys() for c in report["candidates"].values())
    assert len(report["epochs"]) == 2
    assert all({"loss", "val_accuracy", "seconds"} <= epoch.keys() for epoch in report["epochs"])
    assert set(report["epochs"][0]["seconds"]) == {"sample", "load", "shuffle", "compute", "reduce"}
    assert report["epochs"][1]["loss"] < report["epochs"][0]["loss"]
    assert 0 <= report["test_accuracy"] <= 1
    assert plot.stat().st_size > 5000
    shown = capfd.readouterr().out
    assert "epoch 2/2" in shown
    assert "test accuracy" in shown


@pytest.mark.distributed
def test_verify_passes_and_a_wrong_gradient_exits_with_1(folder, common, capsys, monkeypatch):
    arguments = ["verify", "--dataset", folder, *common, "--dtype", "float64", "--json"]
    assert cli.main([*arguments, "--ranks", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["strategies"]) == {"gdp", "nfp", "snp", "dnp"}
    assert all(found["gradients"] < 1e-10 for found in document["strategies"].values())

    wrong = verify.Difference(loss=0.0, gradients=1e-3, worst_gradient="convs.0.lin_l.weight")
    monkeypatch.setattr(cli, "_on_ranks", lambda *arguments, **options: [{"gdp": wrong}])
    assert cli.main([*arguments, "--ranks", "2"]) == 1


@pytest.mark.distributed
def test_plan_partition_explain_and_bench(folder, common, tmp_path, capsys):
    parts, saved = str(tmp_path / "parts"), str(tmp_path / "plan.json")
    assert cli.main(["partition", "--dataset", folder, "--ranks", "2", "--out", parts]) == 0
    arguments = ["--dataset", folder, "--ranks", "2", "--partition", parts, *common]
    assert cli.main(["plan", *arguments, "--model", "gin", "--out", saved]) == 0
    assert cli.main(["explain", saved]) == 0
    assert "predicted per epoch" in capsys.readouterr().out
    assert cli.main(["bench", *arguments, "--steps", "2", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["strategies"]) == {"gdp", "nfp", "snp", "dnp"}
    assert result["regret"] >= 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--strategy", "best"], "gdp, nfp, snp, dnp"),
        (["train", "--dataset", "nowhere"], "movielens, sbm or an existing folder"),
        (["train", "--ranks", "0"], "ranks=0"),
        (["train", "--ranks", "99999"], "the number of nodes"),
        (["train", "--fanouts", "nan,3"], "fanouts"),
        (["train", "--model", "transformer"], "sage, gcn"),
        (["train", "--epochs", "0"], "epochs=0"),
        (["train", "--timeout", "0"], "timeout=0.0"),
        (["train", "--clip", "-1"], "clip=-1.0"),
        (["train", "--save", "nowhere/model.npz"], "--save"),
        (["train", "--plot", "nowhere/plot.png"], "--plot"),
        (["verify", "--steps", "0"], "steps=0"),
        (["bench", "--rounds", "0"], "rounds=0"),
        (["plan", "--out", "nowhere/plan.json"], "--out"),
        (["explain", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(folder, capsys, arguments, message):
    if arguments[0] != "explain" and "--dataset" not in arguments:
        arguments = [*arguments, "--dataset", folder]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_without_nodes_to_validate_or_test_on_there_is_no_accuracy(tmp_path, capfd):
    data = datasets.sbm(120, num_classes=4, num_features=9, seed=1)
    for mask in (data.val_mask, data.test_mask):
        mask[:] = False
    data.save(tmp_path / "blocks")
    job = TrainJob(dataset=str(tmp_path / "blocks"), hidden=8, fanouts=(4, 4), batch_size=64, epochs=1, num_trials=0)
    report = train_on_rank(Group.single(), job, partition_graph(data.graph, 1))
    assert report["epochs"][0]["val_accuracy"] is None
    assert report["test_accuracy"] is None
    assert "validation -" in capfd.readouterr().out


def test_the_grid_runs_single_cells(capsys):
    wanted = [cell for mbit in (1000, 100) for cell in Grid().matching("random 10% 8").cells(mbit)]
    assert [(c["link_mbit"], c["hidden"]) for c in wanted] == [(1000, 8), (100, 8)]
    assert {(c["partition"], c["cache"]) for c in wanted} == {("random", "10%")}
    assert len(Grid().matching("metis").cells(100)) == 8
    assert cli.main(["bench", "--grid", "--only", "kmeans 8"]) == 2
    assert "kmeans" in capsys.readouterr().err
