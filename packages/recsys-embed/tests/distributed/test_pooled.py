"""Owners that return partial pools: the same training within rounding, ahead or not, weights or not, any optimiser."""

from dataclasses import replace

import pytest
import torch

from core_kernels.interconnect import Interconnect
from recsys_embed import (
    SGD,
    AccessStats,
    EmbeddingBagConfig,
    InputError,
    KeyedJaggedTensor,
    PlanMismatchError,
    TieredEmbeddingBagCollection,
    plan_tiers,
)
from recsys_embed.optimizers import OPTIMIZERS
from recsys_embed.plan import Plan
from recsys_embed.pooled import PooledSpace
from recsys_embed.verify import Case, compare, hot_plan, reference_tables, run_case

pytestmark = pytest.mark.distributed


def run_pooled(group, tables, batches, cases, pooled):
    def make_plan(tables, batches, hot, size):
        plan = hot_plan(tables, batches, hot, size)
        rows = {name: rows for name, rows in plan.hot_rows.items() if name not in pooled}
        return replace(plan, pooled=tuple(pooled), hot_rows=rows)

    found = [run_case(group, tables, batches, case, make_plan) for case in cases]
    return found if group.rank == 0 else []


@pytest.mark.parametrize("weighted", [False, True])
def test_pools_of_owners_train_like_rows(pools, tables, make_batches, weighted):
    batches = make_batches(8, 16, weighted=weighted)
    names = ["sgd", "rowwise_adagrad"] if weighted else list(OPTIMIZERS)
    cases = [Case(20, p, o, deterministic=False, weight_decay=0.01) for o in names for p in (False, True)]
    found = pools(2).run(run_pooled, tables, batches, cases, ["film", "user"])[0]
    for case, state in zip(cases, found, strict=True):
        assert compare(state, reference_tables(tables, batches, case)).worst_relative < 2e-6, case


def weights_on_one_rank(group, tables, batch):
    plan = Plan(Plan.without_tier(tables, group.size).tables, group.size, pooled=("film",))
    embeddings = TieredEmbeddingBagCollection(tables, plan, SGD(0.1), group)
    plain = TieredEmbeddingBagCollection(tables, None, SGD(0.1), group)
    if group.rank == 0:
        weights = torch.linspace(0.5, 2, len(batch.values()))
        batch = KeyedJaggedTensor(batch.keys(), batch.values(), batch.lengths(), weights)
    pairs = [emb(batch).values() for emb in (embeddings, plain)]
    kinds = sorted(type(space).__name__ for space in embeddings.spaces)
    return kinds, float((pairs[0] - pairs[1]).detach().abs().max())


def test_ranks_with_and_without_weights_mix(pools, tables, make_batches):
    for kinds, difference in pools(2).run(weights_on_one_rank, tables, make_batches(1, 8)[0]):
        assert kinds == ["PooledSpace", "RowSpace", "RowSpace"]
        assert difference < 1e-6


def no_pools_when_deterministic(group, tables):
    plan = Plan(Plan.without_tier(tables, group.size).tables, group.size, pooled=("film",))
    exact = TieredEmbeddingBagCollection(tables, plan, SGD(0.1), group, deterministic=True)
    assert not any(isinstance(space, PooledSpace) for space in exact.spaces)
    with pytest.raises(PlanMismatchError, match="pools the tables"):
        exact.retier(Plan.without_tier(tables, group.size))
    with pytest.raises(PlanMismatchError, match="without hot rows"):
        TieredEmbeddingBagCollection(tables, replace(plan, hot_rows={"film": [1]}), SGD(0.1), group)


def test_deterministic_mode_fetches_rows_and_wrong_plans_are_named(pools, tables):
    pools(2).run(no_pools_when_deterministic, tables)


def long_bags():
    tables = [EmbeddingBagConfig("history", 50_000, 16, ["seen"]), EmbeddingBagConfig("user", 1000, 16, ["user"])]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.full((64,), 40), torch.ones(64, dtype=torch.int64)])
    seen = torch.randint(50_000, (64 * 40,), generator=generator)
    users = torch.randint(1000, (64,), generator=generator)
    return tables, [KeyedJaggedTensor(["seen", "user"], torch.cat([seen, users]), lengths)] * 4


def test_the_planner_pools_long_bags_alone(tmp_path):
    tables, batches = long_bags()
    stats = AccessStats.from_batches(batches, tables)
    plan = plan_tiers(stats, Interconnect.preset("ethernet-100mbit"), tables, 4, 64, SGD(), prefetch=False)
    assert plan.pooled == ("history",)
    assert "partial pools instead of rows: history" in plan.explain()
    assert plan.chosen.sent_bytes["pools and their gradients"] == pytest.approx(2 * 64 * 4 * 64 * 0.75, rel=1e-3)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    net = Interconnect.preset("ethernet-100mbit")
    assert plan_tiers(stats, net, tables, 4, 64, SGD(), pooled=()).pooled == ()
    with pytest.raises(InputError, match="pooled"):
        plan_tiers(stats, net, tables, 4, 64, SGD(), pooled=["film"])
