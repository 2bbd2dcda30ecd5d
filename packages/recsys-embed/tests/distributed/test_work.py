"""What ids and rows cost the processor is measured on all ranks at once."""

from dataclasses import asdict

import pytest

from core_kernels.comm import Group
from recsys_embed import WorkCosts
from recsys_embed.work import WorkLoad

pytestmark = pytest.mark.distributed


def measure(group):
    return WorkCosts.measure(group, steps=2)


def test_ranks_agree_on_costs_that_grow_with_the_load(pools, tmp_path):
    costs, other = pools(2).run(measure)
    assert costs == other
    assert costs.ranks_per_core >= 1
    assert min(value for name, value in asdict(costs).items() if name.startswith("per_")) >= 0
    small, large = WorkLoad(1, 1, 100, 6400, 100, 6400, 6400), WorkLoad(1, 1, 9000, 576e3, 9000, 576e3, 576e3)
    assert 0 < costs.seconds(small) < costs.seconds(large)
    assert WorkCosts.load(costs.save(tmp_path / "work.json")) == costs


def test_one_rank_measures_itself():
    assert WorkCosts.measure(Group.single(), steps=1).per_step >= 0
