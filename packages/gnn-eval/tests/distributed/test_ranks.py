"""Several ranks share the destinations and all get the whole result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.distributed


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin1, self.lin2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, edge_index):
        for lin in (self.lin1, self.lin2):
            x = torch.zeros(x.size(0), lin.out_features).index_add(0, edge_index[1], lin(x)[edge_index[0]]).relu()
        return x


def _data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(101, 6, generator=generator), torch.randint(90, (2, 500), generator=generator)


def evaluate_on_rank(group):
    import gnn_eval

    plan = gnn_eval.compile(Sums(), _data())
    whole = plan.run(_data(), group=group, batch_rows=9, fuse=False)
    some = plan.run(_data(), group=group, nodes=torch.arange(0, 101, 4), fuse=False)
    return whole, some, plan.last_report.num_edges


def evaluate_on_disk(group, place):
    import gnn_eval
    from gnn_eval.engine import Engine

    graph = gnn_eval.StoredGraph(f"{place}/graph")
    plan = gnn_eval.compile(Sums(), graph.example(Sums()))
    options = {"group": group, "batch_rows": 9, "fuse": False, "store": f"{place}/work", "out": f"{place}/out.npy"}
    whole = plan.run(graph, **options).clone()
    all_rows = sum(stage.rows for stage in plan.last_report.stages)
    write, calls = Engine._write, []

    def dies(self, *args):
        calls.append(1)
        if len(calls) == 4 + group.rank:
            raise KeyboardInterrupt
        return write(self, *args)

    Engine._write = dies
    try:
        plan.run(graph, **options)
        died = False
    except KeyboardInterrupt:
        died = True
    finally:
        Engine._write = write
    resumed = plan.run(graph, resume=True, **options)
    left = sum(stage.rows for stage in plan.last_report.stages)
    return whole, resumed.clone(), died, all_rows, left


def test_ranks_agree_with_the_full_forward(tmp_path):
    import gnn_eval
    from core_kernels.testing import RankPool

    with RankPool(2) as pool:
        results = pool.run(evaluate_on_rank)
        gnn_eval.convert(dict(zip(("x", "edge_index"), _data(), strict=True)), tmp_path / "graph", "cluster", 20)
        on_disk = pool.run(evaluate_on_disk, str(tmp_path))
    with torch.no_grad():
        expected = Sums()(*_data())
    for whole, some, _ in results:
        assert torch.equal(whole, expected)
        assert torch.equal(some, expected[::4])
    assert all(edges > 0 for _, _, edges in results)
    for whole, resumed, died, all_rows, left in on_disk:
        assert torch.equal(whole, expected)
        assert torch.equal(resumed, expected)
        assert died
        assert left <= all_rows - 3 * 9
