"""Access counts are exact and add up; plans follow the interconnect and the cap."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels.comm import Group
from core_kernels.interconnect import Curve, Interconnect
from recsys_embed import (
    AccessStats,
    EmbeddingBagConfig,
    IdRangeError,
    InputError,
    KeyedJaggedTensor,
    Plan,
    WorkCosts,
    plan_tiers,
)
from recsys_embed.cost_model import traffic_of
from recsys_embed.optimizers import SGD, Adam
from recsys_embed.planner import workload_of

TABLES = [EmbeddingBagConfig("a", 300, 16, ["f"]), EmbeddingBagConfig("b", 50, 16, ["g"])]


def batches_of(seed=0, num=40, size=64):
    generator = np.random.default_rng(seed)
    for _ in range(num):
        ids = (np.array([300, 50]) * generator.random((size, 2)) ** 4).astype(np.int64)
        yield KeyedJaggedTensor.from_dense(["f", "g"], torch.from_numpy(ids))


def test_counts_equal_numpy_beyond_one_byte():
    batches = list(batches_of(num=300))
    stats = AccessStats.from_batches(batches, TABLES, sample=None)
    columns = [np.concatenate([b.values().view(2, -1)[i].numpy() for b in batches]) for i in range(2)]
    present = np.sum([np.bincount(np.unique(b.values().view(2, -1)[0]), minlength=300) for b in batches], axis=0)
    assert stats.counts("a").max() > 255
    np.testing.assert_array_equal(stats.counts("a"), np.bincount(columns[0], minlength=300))
    np.testing.assert_array_equal(stats.counts("b"), np.bincount(columns[1], minlength=50))
    np.testing.assert_array_equal(stats.counts("a", "presence"), present)
    assert stats.num_distinct == stats.counts("a", "presence").sum() + stats.counts("b", "presence").sum()


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 30), seed=st.integers(0, 5))
def test_parts_add_up_to_the_whole(cut, seed):
    batches = list(batches_of(seed, num=30))
    whole, left, right = (
        AccessStats.from_batches(b, TABLES, sample=None) for b in (batches, batches[:cut], batches[cut:])
    )
    left.merge(right)
    for name in ("a", "b"):
        for which in ("accesses", "presence"):
            np.testing.assert_array_equal(left.counts(name, which), whole.counts(name, which))
    assert (left.num_batches, left.num_distinct) == (whole.num_batches, whole.num_distinct)


def test_saved_and_gathered_counts_are_the_same(tmp_path):
    stats = AccessStats.from_batches(batches_of(), TABLES)
    stats.save(tmp_path / "stats.npz")
    for other in (AccessStats.load(tmp_path / "stats.npz", TABLES), stats.gather(Group.single())):
        np.testing.assert_array_equal(other.counts("a"), stats.counts("a"))
        assert other.describe() == stats.describe()
    with pytest.raises(InputError, match="count again"):
        AccessStats.load(tmp_path / "stats.npz", TABLES[:1])


def test_shared_cells_never_lower_a_count():
    exact, shared = AccessStats(TABLES), AccessStats(TABLES, max_cells=64)
    for batch in batches_of():
        exact.add(batch)
        shared.add(batch)
    assert (shared.counts("a") >= exact.counts("a")).all()
    assert shared.counts("a")[0] < 1.2 * exact.counts("a")[0]


def test_ids_outside_a_table_are_named():
    with pytest.raises(IdRangeError, match=r"feature 'g' holds the id 50.*\[0, 50\)"):
        AccessStats(TABLES).add(KeyedJaggedTensor.from_dense(["f", "g"], torch.tensor([[1, 50]])))


def network(all_reduce_rate, all_to_all_rate, latency=1e-5):
    def line(rate):
        return Curve((1.0, 1e9), (latency, latency + 1e9 / rate))

    curves = {"4x1": {"all_reduce": line(all_reduce_rate), "all_to_all": line(all_to_all_rate)}}
    rates = {"gather_bytes_per_second": 1e12, "relabel_ids_per_second": 1e12}
    return Interconnect("test", "given", "4x1", curves=curves, rates=rates)


def test_the_tier_follows_the_cost_of_an_all_reduce():
    stats = AccessStats.from_batches(batches_of(), TABLES)
    cheap, dear = (plan_tiers(stats, net, TABLES, 4, 64, SGD(0.1)) for net in (network(1e8, 1e6), network(1e5, 1e6)))
    assert cheap.num_hot_rows > 20
    assert dear.num_hot_rows == 0
    assert "below 2 %" in dear.explain()
    assert cheap.chosen.step_seconds == min(c.step_seconds for c in cheap.candidates)
    some = plan_tiers(stats, network(1e8, 1e6), TABLES, 4, 64, SGD(0.1), hot=40)
    hot, counts = some.hot_rows["a"], stats.counts("a", "presence")
    assert counts[hot].min() >= np.delete(counts, hot).max()


def test_the_tier_follows_the_work_on_rows():
    stats, net = AccessStats.from_batches(batches_of(), TABLES), network(1e6, 1e6)
    cold_costs, hot_costs = WorkCosts(per_row=1e-4), WorkCosts(per_hot_byte=1e-5)
    assert plan_tiers(stats, net, TABLES, 4, 64, SGD(0.1), work=hot_costs).num_hot_rows == 0
    chosen = plan_tiers(stats, net, TABLES, 4, 64, SGD(0.1), work=cold_costs)
    assert chosen.num_hot_rows > 20
    twice = plan_tiers(stats, net, TABLES, 4, 64, SGD(0.1), work=WorkCosts(per_row=1e-4, ranks_per_core=2.0), hot=0)
    assert twice.chosen.work_seconds == pytest.approx(2 * chosen.candidates[0].work_seconds)


def test_small_tables_are_replicated_whole_where_messages_cost_more_than_bytes():
    stats, net = AccessStats.from_batches(batches_of(), TABLES), network(1e9, 1e9, latency=1e-3)
    plan = plan_tiers(stats, net, TABLES, 4, 64, SGD(0.1), dense_bytes=1000)
    assert plan.num_hot_rows == 350
    assert sum(plan.chosen.sent_bytes.values()) == plan.chosen.sent_bytes["hot"]
    assert sum(len(rows) for rows in plan.hot_rows.values()) == 350  # rows that no batch named, too


def test_traffic_is_that_of_the_formula_by_hand():
    stats = AccessStats.from_batches(batches_of(), TABLES)
    work = workload_of(stats, TABLES, 4, 64, SGD(0.1))
    q = np.concatenate([stats.counts(n, "presence") for n in ("a", "b")]) / 40
    u = 1 - (1 - q) ** 4
    traffic = traffic_of(work, 0)
    assert traffic.late_rows == pytest.approx(float((q * u).sum() * 64 * 3 / 4), rel=1e-9)
    assert traffic.late_rows + traffic.free_rows == pytest.approx(float(q.sum() * 64 * 3 / 4), rel=1e-9)


def test_plans_are_files_and_respect_the_cap(tmp_path):
    stats = AccessStats.from_batches(batches_of(), TABLES)
    shard = 350 * 16 * 4 * 3 / 4
    plan = plan_tiers(stats, network(1e9, 1e6), TABLES, 4, 64, Adam(0.1), memory_cap=shard + 10 * 16 * 4 * 3)
    assert 0 < plan.num_hot_rows <= 10
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    with pytest.raises(InputError, match="at least the shard"):
        plan_tiers(stats, network(1e9, 1e6), TABLES, 4, 64, Adam(0.1), memory_cap=100)
    with pytest.raises(InputError, match="count again"):
        plan_tiers(stats, network(1e9, 1e6), TABLES[:1], 4, 64, Adam(0.1))
    assert plan_tiers(stats, network(1e9, 1e6), TABLES, 4, 64, SGD(0.1), hot=7).num_hot_rows == 7
    assert plan_tiers(stats, network(1e9, 1e6), TABLES, 4, 64, SGD(0.1), hot=350).num_hot_rows == 350
    assert plan_tiers(stats, network(1e9, 1e6), TABLES, 1, 64, SGD(0.1)).num_hot_rows == 0


@pytest.mark.parametrize("costs", [{"per_row": float("nan")}, {"per_id": -1.0}, {"ranks_per_core": 0.5}])
def test_costs_that_cannot_be_are_refused(costs):
    with pytest.raises(InputError, match="measure on the machine"):
        WorkCosts(**costs)
    stats = AccessStats.from_batches(batches_of(num=2), TABLES)
    with pytest.raises(InputError, match="dense_bytes"):
        plan_tiers(stats, network(1e6, 1e6), TABLES, 4, 64, SGD(0.1), dense_bytes=-1.0)


def test_criteo_has_the_known_skew(criteo):
    ids = criteo["sparse"].astype(np.int64)
    first, last = ids.min(0), ids.max(0)
    tables = [EmbeddingBagConfig(f"C{i}", int(last[i] - first[i] + 1), 16, [f"C{i}"]) for i in range(26)]
    stats = AccessStats(tables)
    for start in range(0, 8192, 512):
        part = torch.from_numpy(ids[start : start + 512] - first)
        stats.add(KeyedJaggedTensor.from_dense([t.name for t in tables], part))
    skew = stats.describe()
    assert (skew["num_accesses"], skew["num_distinct_rows"]) == (212_992, 39_910)
    assert skew["head_1_percent"] == pytest.approx(0.61, abs=0.01)
    assert skew["gini"] == pytest.approx(0.78, abs=0.01)
    assert stats.dedup_factor == pytest.approx(2.75, abs=0.01)
