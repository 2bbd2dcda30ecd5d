"""Graphs and intermediate values on disk, killed runs resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gnn_eval
from gnn_eval.disk_rows import DiskRows
from gnn_eval.engine import Engine


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
