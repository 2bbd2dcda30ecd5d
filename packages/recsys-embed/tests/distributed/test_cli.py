"""The command line, from counting to training, as a user calls it."""

import json

import pytest

from recsys_embed import WorkCosts
from recsys_embed.cli import main
from recsys_embed.data import FieldSpec, make_clicks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    make_clicks(6000, [FieldSpec("a", 60), FieldSpec("b", 40, 1.2)], num_dense=3).save(folder)
    return f"folder:{folder}"


def run_json(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_stats_plan_explain(dataset, capsys, tmp_path):
    common = ("--dataset", dataset, "--batch-size", "100")
    code, skew = run_json(capsys, "stats", *common)
    assert (code, skew["num_accesses"]) == (0, 12_000)
    path = str(tmp_path / "plan.json")
    code, plan = run_json(capsys, "plan", *common, "--ranks", "4", "--out", path, "--hot", "5")
    assert (code, plan["world_size"], sum(map(len, plan["hot_rows"].values()))) == (0, 4, 5)
    assert main(["explain", path]) == 0
    assert "hot tier: 5 rows" in capsys.readouterr().out


def test_plans_count_on_calibrated_work(dataset, capsys, tmp_path):
    path = str(tmp_path / "work.json")
    code, costs = run_json(capsys, "calibrate", "--ranks", "1", "--out", path)
    assert (code, costs["ranks_per_core"] >= 1) == (0, True)
    WorkCosts(per_row=1.0).save(path)
    code, plan = run_json(capsys, "plan", "--dataset", dataset, "--batch-size", "50", "--work", path)
    assert (code, sum(map(len, plan["hot_rows"].values()))) == (0, 100)


def test_train_on_two_ranks_learns(dataset, capsys):
    words = ("--dataset", dataset, "--batch-size", "50", "--ranks", "2", "--epochs", "3", "--width", "4")
    code, result = run_json(capsys, "train", *words, "--hot", "10", "--learning-rate", "0.02")
    assert (code, result["hot_rows"], len(result["epochs"])) == (0, 10, 3)
    assert result["epochs"][-1]["loss"] < result["epochs"][0]["loss"]
    assert result["auc"] > 0.55


def test_verify_on_own_data(dataset, capsys):
    words = ("--dataset", dataset, "--batch-size", "64", "--ranks", "1", "--steps", "3", "--optimizers", "sgd,adam")
    code, result = run_json(capsys, "verify", *words)
    assert (code, result["equal"], len(result["cases"])) == (0, True, 16)


def test_convert_and_errors(tmp_path, capsys):
    line = "\t".join(["1", *["2"] * 13, *["ab"] * 26]) + "\n"
    (tmp_path / "train.txt").write_text(line * 4)
    assert main(["convert", "criteo", str(tmp_path / "train.txt"), str(tmp_path / "out")]) == 0
    assert main(["stats", "--dataset", "nothing"]) == 2
    assert "error: dataset='nothing'" in capsys.readouterr().err
