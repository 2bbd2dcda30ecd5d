from __future__ import annotations

import json

import numpy as np
import pytest

from gnn_comm.bench_cli import read_hosts
from gnn_comm.cli import main
from gnn_comm.sources import load_graph_data


def run_json(capsys, *argv):
    code = main([*argv, "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def test_topology_commands(capsys, tmp_path):
    assert len(run_json(capsys, "topo", "show", "dgx1")["nodes"]) == 14
    target = tmp_path / "t.yaml"
    assert main(["topo", "import", "hosts4", "--out", str(target)]) == 0
    assert run_json(capsys, "topo", "show", str(target))["name"] == "hosts4" if not capsys.readouterr().err else False


def test_partition_plan_explain_simulate_verify(capsys, tmp_path):
    parts, file = str(tmp_path / "parts"), str(tmp_path / "p.npz")
    report = run_json(capsys, "partition", "--graph", "sbm:200", "--topology", "dgx1", "--out", parts)
    assert report["num_parts"] == 8
    summary = run_json(capsys, "plan", "--partition", parts, "--topology", "dgx1", "--planner", "spst", "--out", file)
    assert summary["planner"] == "spst"
    assert summary["bound_ratio"] >= 1 - 1e-4
    explained = run_json(capsys, "explain", file, "--partition", parts)
    assert "spst plan" in explained["explanation"]
    simulated = run_json(capsys, "simulate", file, "--width", "16")
    assert simulated["forward"]["seconds"] > 0
    assert run_json(capsys, "verify", file, "--partition", parts, "--no-run")["replay"]
    assert main(["verify", file, "--partition", parts, "--no-run", "--topology", "pcie8"]) == 2
    assert "made for topology 'dgx1'" in capsys.readouterr().err


def test_verify_fails_with_code_1_on_a_wrong_plan(capsys, tmp_path):
    parts, file = str(tmp_path / "parts"), tmp_path / "p.npz"
    main(["partition", "--graph", "sbm:200", "--topology", "hosts4", "--out", parts])
    main(["plan", "--partition", parts, "--topology", "hosts4", "--out", str(file)])
    # A plan whose author made the same mistake in the fingerprint: only the replay can tell.
    from gnn_comm import Partition, Plan
    from gnn_comm.transfers import Transfers

    made = Plan.load(file, Partition.load(parts))
    t = made.transfers
    rows = t.rows.copy()
    rows[0] = rows[1]
    object.__setattr__(made, "transfers", Transfers(4, t.stage, t.sender, t.receiver, t.row_indptr, rows))
    made.save(file)
    capsys.readouterr()
    assert main(["verify", str(file), "--partition", parts, "--no-run"]) == 1
    assert "failed: the plan has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--graph", "magic:3", "--topology", "dgx1"], "magic:3"),
        (["plan", "--topology", "dgx1"], "--graph or --partition"),
        (["topo", "show", "dgx9"], "neither a file nor a preset"),
        (["topo", "import", "dgx1"], "--out"),
        (["train", "--ranks", "3", "--topology", "dgx1"], "--ranks 8"),
        (["bench", "--hosts", "ax2"], "2x4 or 2+4"),
        (["bench", "--hosts", "2x0"], "at least 1 rank"),
        (["bench", "--rates", "nan,1"], "2 positive numbers"),
        (["bench", "--payloads", "inf"], "positive numbers"),
        (["bench", "--repeats", "0"], "--repeats 0"),
        (["bench", "--epoch", "gcn", "--hosts", "2x2,2x4"], "one machine"),
        (["bench", "--json", "nowhere/b.json"], "make it first"),
        (["train", "--epochs", "0"], "num_epochs=0"),
        (["train", "--planner", "p2p,magic"], "magic"),
        (["train", "--model", "gat", "--hidden", "10"], "pass 12"),
        (["plan", "--graph", "rmat:4", "--topology", "dgx1", "--width", "0"], "width=0"),
        (["plan", "--graph", "rmat:4", "--topology", "dgx1", "--out", "nowhere/p.npz"], "make it first"),
        (["simulate", "nowhere.npz"], "plan again"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, argv, message):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_hosts_are_read():
    assert read_hosts("2x4") == [4, 4]
    assert read_hosts("2+4") == [2, 4]


def test_graph_sources(tmp_path):
    assert load_graph_data("rmat:6").graph.num_nodes == 64
    data = load_graph_data("grid:4", num_features=3)
    assert data.features.shape == (16, 3)
    assert int(data.train_mask.sum()) > 0
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    assert load_graph_data(str(tmp_path / "e.txt")).graph.num_edges == 2
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    assert load_graph_data(str(tmp_path)).graph.num_edges == 2
