"""Graphs and intermediate values on disk, killed runs resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gnn_eval
from gnn_eval.disk_rows import DiskRows
from gnn_eval.engine import Engine
from gnn_eval.executor import StageRunner
from gnn_eval.look_ahead import RecentRows


def test_rows_are_read_as_numpy_reads_them(tmp_path):
    values = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    rows = DiskRows(tmp_path / "x.npy")
    for ids in (torch.tensor([], dtype=torch.int64), torch.randint(5000, (300,)), torch.arange(0, 5000, 3)):
        assert np.array_equal(rows.read_rows(ids).numpy(), values[ids.numpy()])
    assert np.array_equal(rows.read_range(10, 4000).numpy(), values[10:4000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_rows_are_written_in_place(tmp_path, dtype):
    rows = DiskRows.create(tmp_path / "y.npy", (100, 3), dtype)
    given = torch.arange(30).reshape(10, 3).to(dtype)
    rows.write_range(20, given)
    rows.write_rows(torch.tensor([99, 0, 1]), given[:3])
    assert torch.equal(rows.read_range(20, 30), given)
    assert torch.equal(rows.read_rows(torch.tensor([0, 99])), given[[1, 0]])


def test_a_file_cut_short_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 4)))
    rows = DiskRows(tmp_path / "x.npy")
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match="cut short"):
        rows.read_range(0, 10)


def test_stored_graph_equals_full_forward(sum_net, make_graph, tmp_path):
    x, edges = make_graph(2000, 9000)
    graph = gnn_eval.convert({"x": x, "edge_index": edges, "edge_weight": torch.rand(9000)}, tmp_path / "graph")
    weight = torch.from_numpy(np.load(tmp_path / "graph" / "edge_weight.npy"))
    with torch.no_grad():
        expected = sum_net(x, graph.edge_index(), weight)
    found = gnn_eval.evaluate(sum_net, graph, memory="1500KB", store=tmp_path / "work", fuse=False)
    assert torch.equal(found, expected)
    assert not list((tmp_path / "work").iterdir())


def test_a_killed_run_goes_on_where_it_was(sum_net, make_graph, tmp_path, monkeypatch):
    data = make_graph(2000, 9000)
    plan = gnn_eval.compile(sum_net, data)
    expected = plan.run(data, batch_rows=100, store=tmp_path / "whole", fuse=False)
    run_block, calls = Engine._run_block, []

    def dies(self, *args):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return run_block(self, *args)

    monkeypatch.setattr(Engine, "_run_block", dies)
    with pytest.raises(KeyboardInterrupt):
        plan.run(data, batch_rows=100, store=tmp_path / "work", fuse=False)
    done = len(calls) - 1
    found = plan.run(data, batch_rows=100, store=tmp_path / "work", fuse=False, resume=True)
    assert torch.equal(found, expected)
    assert len(calls) - done - 1 < 45
    assert sum(stage.blocks for stage in plan.last_report.stages) + done <= 61


def test_another_models_run_is_not_resumed(sum_net, make_graph, tmp_path):
    data = make_graph()
    plan = gnn_eval.compile(sum_net, data)
    work = tmp_path / "work"
    work.mkdir()
    (work / "progress.json").write_text('{"fingerprint": "0", "done": {"0": 5}}')
    with pytest.raises(ValueError, match="another model, graph, request"):
        plan.run(data, store=work, resume=True)


def test_duplicate_and_neighbouring_rows_are_told_apart(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    rows = DiskRows(tmp_path / "x.npy")
    for ids in ([5, 5, 7], [0, 1, 1, 2], [9, 0, 9], [3]):
        assert torch.equal(rows.read_rows(torch.tensor(ids)), torch.from_numpy(np.load(tmp_path / "x.npy"))[ids])


def test_gaps_are_read_and_wide_gaps_are_not(tmp_path):
    rows = DiskRows.create(tmp_path / "x.npy", (100_000, 16), torch.float32)
    near, far = torch.arange(0, 2000, 2), torch.arange(0, 100_000, 1000)
    rows.read_rows(near)
    assert rows.read_bytes == 1999 * 64
    rows.read_rows(far)
    assert rows.read_bytes == 1999 * 64 + 100 * 64


def test_rows_of_the_block_before_are_not_read_again(tmp_path):
    values = torch.randn(300, 4)
    np.save(tmp_path / "x.npy", values.numpy())
    recent = RecentRows(DiskRows(tmp_path / "x.npy"))
    for ids in (torch.arange(0, 100), torch.arange(50, 200, 2), torch.arange(90, 130)):
        recent.turn()
        before = recent.store.read_bytes
        assert torch.equal(recent.read(ids, keep=True), values[ids])
    assert recent.reused_rows == 25 + 20
    assert recent.store.read_bytes - before == (129 - 91 + 1) * 16
    assert torch.equal(recent.read_range(100, 120), values[100:120])


def test_rows_are_reused_and_read_ahead_in_a_run(sum_net, make_graph, tmp_path):
    x, edges = make_graph(3000, 12_000)
    edges[0] = (edges[1] + edges[0] % 60) % 2990
    graph = gnn_eval.convert({"x": x, "edge_index": edges}, tmp_path / "graph")
    plan = gnn_eval.compile(sum_net, graph.example(sum_net))
    plan.run(graph, batch_rows=100, store=tmp_path / "work")
    last = plan.last_report.stages[-1]
    assert last.reused_rows > 0.2 * last.source_rows
    assert last.read_bytes < 3 * (3000 * 12 + 12_000 * 4)


def test_a_graph_in_cluster_order_shows_no_other_ids(sum_net, make_graph, tmp_path):
    x, edges = make_graph(1000, 5000)
    np.save(tmp_path / "x.npy", x.numpy())
    weight = torch.rand(5000)
    with torch.no_grad():
        expected = sum_net(x, edges, weight)
    given = {"x": tmp_path / "x.npy", "edge_index": edges, "edge_weight": weight}
    graph = gnn_eval.convert(given, tmp_path / "graph", "cluster", 100)
    assert graph.row_of_node is not None
    options = {"batch_rows": 70, "fuse": False, "store": tmp_path / "work"}
    plan = gnn_eval.compile(sum_net, graph.example(sum_net))
    assert torch.equal(plan.run(graph, **options), expected)
    nodes = torch.tensor([999, 3, 3, 500])
    assert torch.equal(plan.run(graph, nodes, **options), expected[nodes])
    found = plan.run(graph, out=tmp_path / "out.npy", memory="4MB", **options)
    assert torch.equal(found, expected)
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_features_of_other_dtypes_and_shapes(make_graph, tmp_path, dtype):
    class Sums(torch.nn.Module):
        def forward(self, x, edge_index):
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]) + x

    x, edges = make_graph(100, 400)
    for shape in ((100,), (100, 2, 5)):
        rows = x[:, : 10 if len(shape) > 1 else 1].reshape(shape).to(dtype)
        graph = gnn_eval.convert({"x": rows, "edge_index": edges}, tmp_path / "graph", "cluster", 20)
        plan = gnn_eval.compile(Sums(), graph.example(Sums()), verify=False)
        out = tmp_path / "out.npy"
        found = plan.run(graph, store=tmp_path / "work", out=out, batch_rows=30, fuse=False)
        assert torch.equal(found, Sums()(rows, edges))


def test_a_request_for_other_nodes_is_not_resumed(sum_net, make_graph, tmp_path):
    data = make_graph()
    plan = gnn_eval.compile(sum_net, data)
    plan.run(data, [1, 2], store=tmp_path, batch_rows=1)
    (tmp_path / "progress.json").write_text('{"fingerprint": "%s", "done": {}}' % ("0" * 16))
    with pytest.raises(ValueError, match="another model, graph, request"):
        plan.run(data, [5], store=tmp_path, resume=True)


@pytest.mark.parametrize("place", ["ram", "work"])
def test_out_of_memory_and_only_that_halves(sum_net, make_graph, tmp_path, monkeypatch, place):
    data = make_graph(1000, 4000)
    plan = gnn_eval.compile(sum_net, data)
    run, sizes = StageRunner.run, []

    def small_only(self, block):
        sizes.append(block.destinations.num_rows)
        if block.destinations.num_rows > 130:
            raise torch.OutOfMemoryError("no room")
        return run(self, block)

    monkeypatch.setattr(StageRunner, "run", small_only)
    store = place if place == "ram" else tmp_path / place
    found = plan.run(data, batch_rows=800, fuse=False, store=store)
    assert torch.equal(found, sum_net(*data))
    assert sizes[:4] == [800, 400, 200, 100]

    def always_wrong(self, block):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(StageRunner, "run", always_wrong)
    with pytest.raises(RuntimeError, match="a mistake"):
        plan.run(data, batch_rows=800)


def test_memory_is_bounded_and_reported(sum_net, tmp_path):
    num_nodes, num_edges = 20_000, 1_500_000
    edges = torch.randint(num_nodes, (2, num_edges))
    edges = edges[:, edges[1].argsort()]
    data = (torch.randn(num_nodes, 10), edges)
    plan = gnn_eval.compile(sum_net, data)
    plan.run(data, memory="70MiB", fuse=False)  # what is loaded on first use does not count
    plan.run(data, memory="70MiB", fuse=False)
    assert 0.5 * 70 * 2**20 < plan.last_report.peak_bytes < 70 * 2**20
    assert plan.last_report.stages[-1].blocks > 1


def test_damaged_graphs_and_outputs_over_them_are_refused(sum_net, make_graph, tmp_path):
    x, edges = make_graph()
    folder = tmp_path / "graph"
    graph = gnn_eval.convert({"x": x, "edge_index": edges}, folder)
    for options, text in (
        ({"out": folder / "x.npy"}, "lies in the directory of the graph"),
        ({"store": folder}, "is the directory of the graph"),
    ):
        with pytest.raises(gnn_eval.EvaluationArgumentError, match=text):
            gnn_eval.evaluate(sum_net, graph, **options)
    for name, text in (("manifest.json", "not JSON"), ("indptr.npy", "cannot be read"), ("x.npy", "cannot be read")):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 3])
        with pytest.raises(gnn_eval.EvaluationArgumentError, match=text):
            gnn_eval.evaluate(sum_net, gnn_eval.StoredGraph(folder))
        (folder / name).write_bytes(whole)
