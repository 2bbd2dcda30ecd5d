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


def test_ranks_agree_with_the_full_forward():
    from core_kernels.testing import RankPool

    with RankPool(2) as pool:
        results = pool.run(evaluate_on_rank)
    with torch.no_grad():
        expected = Sums()(*_data())
    for whole, some, _ in results:
        assert torch.equal(whole, expected)
        assert torch.equal(some, expected[::4])
    assert all(edges > 0 for _, _, edges in results)
