"""A race between sizes of the hot tier: the fastest stays, no tier unless another gains, and no value changes."""

import pytest
import torch

from core_kernels.interconnect import Interconnect
from recsys_embed import SGD, AccessStats, InputError, TieredEmbeddingBagCollection, plan_tiers
from recsys_embed.checkpoint import gather_tables
from recsys_embed.race import choose_runners, race_tiers

pytestmark = pytest.mark.distributed
_SECONDS = {0: 1.0, 4: 0.9, 8: 0.6, 16: 0.5, 32: 0.7}


def race(group, tables, batches, scale):
    stats = AccessStats.from_batches(batches, tables)
    net = Interconnect.preset("ethernet-100mbit")
    plan = plan_tiers(stats, net, tables, group.size, 8, SGD())
    embeddings = TieredEmbeddingBagCollection(tables, plan, SGD(0.1), group, deterministic=True)
    turns = []

    def train():
        turns.append(None)
        for batch in batches[:2]:
            embeddings(batch).values().square().sum().backward()
        hot = sum(len(space.hot) for space in embeddings.spaces)
        return 1.0 - scale * (1.0 - _SECONDS.get(hot, 0.8)) + 0.001 * group.rank

    result = race_tiers(embeddings, stats, plan, train, rounds=5, runners=[4, 16, 32])
    plain = TieredEmbeddingBagCollection(tables, None, SGD(0.1), group, deterministic=True)
    for _ in turns:
        for batch in batches[:2]:
            plain(batch).values().square().sum().backward()
    raced, expected = gather_tables(embeddings), gather_tables(plain)
    equal = all(torch.equal(raced[name], expected[name]) for name in expected)
    ran = (sorted(result.step_seconds), result.num_rounds, len(turns))
    return result.plan.num_hot_rows, embeddings.plan.num_hot_rows, ran, equal


def test_the_fastest_size_stays_and_nothing_else_changes(pools, tables, make_batches):
    for winner, plan, ran, equal in pools(2).run(race, tables, make_batches(4, 8), 1.0):
        assert (winner, plan, equal) == (16, 16, True)
        assert ran == ([0, 4, 16, 32], 4, 1 + 4 + 4 + 3 + 2)  # who is far behind leaves before the intervals say so


def test_no_tier_stays_unless_another_gains_one_per_cent(pools, tables, make_batches):
    assert [r[:2] for r in pools(2).run(race, tables, make_batches(4, 8), 0.015)] == [(0, 0)] * 2


def test_runners_are_few_and_hold_none_and_the_choice(tables, make_batches):
    stats = AccessStats.from_batches(make_batches(6, 16), tables)
    plan = plan_tiers(stats, Interconnect.preset("loopback-cpu"), tables, 2, 16, SGD())
    runners = choose_runners(plan)
    assert {0, plan.num_hot_rows} <= set(runners)
    assert len(runners) <= 7
    middle = min((c for c in plan.candidates if c.num_hot_rows), key=lambda c: c.step_seconds)
    near = [r for r in runners if r and 2 / 3 < r / middle.num_hot_rows < 3 / 2]
    assert near or middle.step_seconds > 1.5 * plan.candidates[0].step_seconds or middle.num_hot_rows < 8
    with pytest.raises(InputError, match="rounds"):
        race_tiers(None, stats, plan, lambda: None, rounds=0)
    with pytest.raises(InputError, match="from 0 to 125"):
        race_tiers(None, stats, plan, lambda: None, runners=[126])


def race_without_seconds(group, tables, batches):
    stats = AccessStats.from_batches(batches, tables)
    plan = plan_tiers(stats, Interconnect.preset("loopback-cpu"), tables, group.size, 8, SGD())
    embeddings = TieredEmbeddingBagCollection(tables, plan, SGD(0.1), group)
    try:
        race_tiers(embeddings, stats, plan, lambda: float("nan") if group.rank else 1.0)
    except InputError as error:
        return str(error)


def test_all_ranks_learn_that_one_has_no_seconds(pools, tables, make_batches):
    assert all("on every rank" in message for message in pools(2).run(race_without_seconds, tables, make_batches(4, 8)))
