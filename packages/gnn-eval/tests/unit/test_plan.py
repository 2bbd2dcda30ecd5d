"""Stages, storage, memory model, files and the command line."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

import gnn_eval
from gnn_eval.cli import main
from gnn_eval.estimate import mean_aggregation
from gnn_eval.lowering import Rows
from gnn_eval.memory import measure_stage
from gnn_eval.order import cluster_order, gain_is_likely, num_source_rows


def test_one_stage_per_source_gather(make_graph):
    gnn = pytest.importorskip("torch_geometric.nn")
    attention = gnn_eval.compile(gnn.GATConv(10, 4).eval(), make_graph())
    assert max(stage.level for stage in attention.stages) == 1
    hops = gnn_eval.compile(gnn.APPNP(7, 0.1).eval(), make_graph())
    assert max(stage.level for stage in hops.stages) == 7
    assert all(len(stage.stores) == 1 for stage in hops.stages)


def test_a_narrowing_layer_runs_before_the_cut(make_graph):
    class Narrow(nn.Module):
        def __init__(self, widths):
            super().__init__()
            self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

        def forward(self, x, edge_index):
            for lin in self.lins:
                x = lin(x).relu()
                x = torch.zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])
            return x

    narrowing = gnn_eval.compile(Narrow([10, 64, 2]).eval(), make_graph())
    stored = {size for stage in narrowing.stages for _, size in stage.stores}
    assert stored == {10 * 0 + 64 * 4, 2 * 4}
    assert [size for _, size in narrowing.stages[1].stores] == [8]


def test_what_is_read_once_is_made_again_rather_than_stored():
    model, data = mean_aggregation(64, 64, 64, 3)
    plan = gnn_eval.compile(model, data)
    assert [stage.level for stage in plan.stages] == [1, 2, 3]
    assert [size for stage in plan.stages for _, size in stage.stores] == [256, 256, 256]


def test_a_plan_from_counts_alone(capsys):
    papers = ["--nodes", "111059956", "--edges", "1615685872", "--width", "128", "--memory", "16GB"]
    assert main(["plan", *papers, "--json"]) == 0
    far = json.loads(capsys.readouterr().out)
    assert main(["plan", *papers, "--source-share", "0.1", "--json"]) == 0
    near = json.loads(capsys.readouterr().out)
    for found in (far, near):
        assert found["disk_bytes"] == 2 * 111059956 * 128 * 4
        assert all(stage["peak_bytes"] <= 16e9 and stage["blocks"] > 1 for stage in found["stages"])
        assert found["seconds"] > 0
    # Features are read at least once, and locality makes reads fewer.
    assert far["stages"][0]["read_bytes"] > near["stages"][0]["read_bytes"] > 111059956 * 128 * 4


def test_memory_model_bounds_what_is_live(sum_net, make_graph):
    plan = gnn_eval.compile(sum_net, make_graph())
    stage = plan.compiled.stages[-1]
    memory = measure_stage(plan.compiled.program, stage, set())
    edge_set = next(iter(stage.edge_sets))
    edge_key = Rows("edge", edge_set.space, edge_set.grouping).key
    per_edge = memory.peak({edge_key: 1000}) / 1000
    assert 3 * 4 <= per_edge <= 3 * 4 + 80
    assert memory.peak({edge_key: 2000}) == pytest.approx(2 * memory.peak({edge_key: 1000}))


def test_save_and_load(sum_net, make_graph, tmp_path):
    data = make_graph()
    plan = gnn_eval.compile(sum_net, data)
    plan.save(tmp_path / "plan.json")
    loaded = gnn_eval.Plan.load(tmp_path / "plan.json", sum_net)
    assert torch.equal(loaded.run(data, fuse=False), sum_net(*data))
    assert loaded.explain() == plan.explain()
    document = json.loads((tmp_path / "plan.json").read_text())
    document["values"][-1]["op"] = "os.system.default"
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"os\.system"):
        gnn_eval.Plan.load(tmp_path / "bad.json", sum_net)


def test_cluster_order_reads_fewer_rows_on_communities():
    generator = torch.Generator().manual_seed(0)
    num_nodes, community, degree = 12_000, 500, 16
    names = torch.randperm(num_nodes, generator=generator)
    targets = torch.arange(num_nodes).repeat_interleave(degree)
    inside = torch.rand(targets.numel(), generator=generator) < 0.8
    near = targets // community * community + torch.randint(community, targets.shape, generator=generator)
    sources = torch.where(inside, near, torch.randint(num_nodes, targets.shape, generator=generator))
    edges = names[torch.stack([sources, targets])]
    order = edges[1].argsort(stable=True)
    indptr = torch.searchsorted(edges[1][order], torch.arange(num_nodes + 1))
    columns = edges[0][order].contiguous()
    found = cluster_order(indptr, columns, 1000)
    assert found.sort().values.equal(torch.arange(num_nodes))
    random = num_source_rows(indptr, columns, torch.arange(num_nodes), 1000)
    assert num_source_rows(indptr, columns, found, 1000) < 0.5 * random
    assert gain_is_likely(indptr, columns, 1000)
    shuffled = torch.randint(num_nodes, columns.shape, generator=generator)
    assert not gain_is_likely(indptr, shuffled, 1000)


def test_blocks_end_where_clusters_end():
    sizes = [700, 500, 600, 300, 400, 500]  # two blocks of 1,000 and one more, if well packed
    nodes = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    cluster = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))
    first = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    targets = torch.arange(3000).repeat_interleave(12)
    spread = torch.randint(2**20, targets.shape, generator=torch.Generator().manual_seed(1))
    sources = first[cluster[targets]] + spread % torch.tensor(sizes)[cluster[targets]]
    order = nodes[targets].argsort(stable=True)
    indptr, columns = torch.arange(3001) * 12, nodes[sources][order].contiguous()
    found = cluster_order(indptr, columns, 2000, 1000)
    assert num_source_rows(indptr, columns, found, 1000) <= 3000


APP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.lin, self.mix = nn.Linear(4, 3), mix
    def forward(self, x, edge_index):
        x = self.lin(x)
        if self.mix:
            x = x - x.mean(0)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

def build(mix=False):
    torch.manual_seed(0)
    return Net(mix), {"x": torch.randn(40, 4), "edge_index": torch.randint(40, (2, 90))}

def mixing():
    return build(True)
"""


def test_command_line(tmp_path, monkeypatch, capsys):
    import numpy as np

    (tmp_path / "gnn_eval_test_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    app = "gnn_eval_test_app"
    assert main(["explain", f"{app}:build", "--save", "plan.json"]) == 0
    assert main(["verify", f"{app}:build", "--seeds", "1", "--json", "v.json"]) == 0
    assert json.loads((tmp_path / "v.json").read_text())["checks"][0]["bit_identical"]
    assert main(["run", f"{app}:build", "--out", "a.npy"]) == 0
    assert main(["convert", f"{app}:build", "graph"]) == 0
    assert main(["run", f"{app}:build", "--data", "graph", "--store", "work", "--out", "b.npy", "--memory", "4MB"]) == 0
    assert np.allclose(np.load("a.npy"), np.load("b.npy"), atol=1e-6)
    capsys.readouterr()
    assert main(["plan", f"{app}:build", "--nodes", "111059956", "--edges", "1615685872", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk_bytes"] > 2**30
    assert main(["explain", f"{app}:mixing"]) == 2
    assert "aten.mean.dim" in capsys.readouterr().err
    assert main(["explain", "no_such_module:build"]) == 2


def test_results_of_several_parts_and_clustered_graphs_from_the_shell(tmp_path, monkeypatch, capsys):
    import numpy as np

    (tmp_path / "gnn_eval_parts_app.py").write_text(
        APP.replace("import torch\n", "import torch\nfrom types import SimpleNamespace\n", 1)
        + """

class Two(Net):
    def forward(self, x, edge_index):
        h = super().forward(x, edge_index)
        return {"sum": h, "both": (h, 2 * h)}

def two():
    torch.manual_seed(0)
    return Two(False), build()[1]

def typed():
    return Net(False), SimpleNamespace(node_types=["paper", "author"])
"""
    )
    monkeypatch.chdir(tmp_path)
    app = "gnn_eval_parts_app"
    assert main(["run", f"{app}:two", "--out", "r.npy", "--json", "r.json"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["out"] == ["r.sum.npy", "r.both.0.npy", "r.both.1.npy"]
    assert np.allclose(2 * np.load("r.sum.npy"), np.load("r.both.1.npy"))
    for name in ("x", "edge_index"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        np.save(tmp_path / "folder" / f"{name}.npy", gnn_eval.cli._build(f"{app}:build")[1][name].numpy())
    assert main(["convert", "folder", "stored", "--order", "cluster"]) == 0
    assert main(["run", f"{app}:build", "--data", "stored", "--out", "stored.npy"]) == 0
    assert np.allclose(np.load("stored.npy"), np.load("r.sum.npy"), atol=1e-6)
    capsys.readouterr()
    assert main(["convert", f"{app}:typed", "nowhere"]) == 2
    assert "node types paper, author" in capsys.readouterr().err
    for command in ("plan", "explain", "run", "verify", "convert"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"gnn-eval {command} " in capsys.readouterr().out
