"""Replicas, checkpoints, moves between tiers, uneven data and disagreements between ranks."""

import itertools

import pytest
import torch
from torch import nn

from core_kernels.errors import CollectiveError
from recsys_embed import (
    SGD,
    Adam,
    EmbeddingBagConfig,
    IdRangeError,
    InputError,
    KeyedJaggedTensor,
    Momentum,
    PipelineError,
    PlanMismatchError,
    PrefetchPipeline,
    TieredEmbeddingBagCollection,
)
from recsys_embed.checkpoint import gather_tables, load_tables, open_table, save_tables
from recsys_embed.verify import hot_plan, split_batch

pytestmark = pytest.mark.distributed


class Model(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings, self.top = embeddings, nn.Linear(28, 1)
        nn.init.constant_(self.top.weight, 0.1)
        nn.init.zeros_(self.top.bias)

    def forward(self, batch):
        return self.top(self.embeddings(batch).values()).squeeze(1)


def build(group, tables, batches, hot, optimizer=None, deterministic=True):
    plan = hot_plan(tables, batches, hot, group.size)
    return TieredEmbeddingBagCollection(tables, plan, optimizer or Momentum(0.05), group, deterministic=deterministic)


def train(group, embeddings, batches, prefetch=True, dense_rate=0.1):
    model = Model(embeddings)
    dense, losses = torch.optim.SGD(model.parameters(), lr=dense_rate), []
    mine = [split_batch(batch, group.rank, group.size) for batch in batches]
    with PrefetchPipeline(model, dense, embeddings, enabled=prefetch) as pipe:
        for batch in pipe(mine):
            dense.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            dense.step()
            losses.append(group.all_reduce(loss.detach().double(), "mean").item())
    return losses


def replicas_after(group, tables, batches, steps, deterministic):
    embeddings = build(group, tables, batches, 30, deterministic=deterministic)
    train(group, embeddings, list(itertools.islice(itertools.cycle(batches), steps)))
    return [(space.hot.weight, *space.hot.states) for space in embeddings.spaces]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("steps", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_replicas_stay_bit_identical(pools, tables, make_batches, steps, deterministic):
    found = pools(4).run(replicas_after, tables, make_batches(5, 8), steps, deterministic)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert any(len(space[0]) for space in found[0])


def save_after(group, tables, batches, hot, folder):
    embeddings = build(group, tables, batches, hot, Adam(0.01))
    train(group, embeddings, batches[:4], dense_rate=0.0)
    save_tables(embeddings, folder)
    return train(group, embeddings, batches[4:], dense_rate=0.0), gather_tables(embeddings)


def resume_from(group, tables, batches, hot, folder):
    embeddings = build(group, tables, batches, hot, Adam(0.01))
    load_tables(embeddings, folder)
    return train(group, embeddings, batches[4:], dense_rate=0.0), gather_tables(embeddings)


def test_checkpoint_of_four_ranks_resumes_on_two_with_another_tier(pools, tables, make_batches, tmp_path):
    batches = make_batches(7, 16)
    saved, tables_saved = pools(4).run(save_after, tables, batches, 30, str(tmp_path))[0]
    resumed, tables_resumed = pools(2).run(resume_from, tables, batches, 5, str(tmp_path))[0]
    assert resumed == pytest.approx(saved, rel=1e-6)
    assert all(torch.equal(tables_saved[k], tables_resumed[k]) for k in tables_saved)
    assert open_table(tmp_path / "film.weight.npy").shape == (60, 8)


def state_dict_round_trip(group, tables, batches):
    first = build(group, tables, batches, 20)
    train(group, first, batches)
    model = Model(first)
    saved = model.state_dict()
    second = Model(build(group, tables, batches, 3))
    second.load_state_dict(saved)
    again = second.state_dict()
    return sorted(saved) == sorted(again) and all(torch.equal(saved[k], again[k]) for k in saved)


def test_state_dict_is_that_of_whole_tables(pools, tables, make_batches):
    assert all(pools(2).run(state_dict_round_trip, tables, make_batches(3, 8)))


def retier_and_train(group, tables, batches, moves):
    embeddings = build(group, tables, batches, 10)
    for number, block in enumerate((batches[:3], batches[3:6], batches[6:])):
        if moves and number:
            before = gather_tables(embeddings)
            embeddings.retier(hot_plan(tables, block, 15 * number, group.size))
            after = gather_tables(embeddings)
            assert all(torch.equal(before[k], after[k]) for k in before)
        train(group, embeddings, block)
    return gather_tables(embeddings)


def test_retiering_changes_nothing(pools, tables, make_batches):
    moved, still = (pools(2).run(retier_and_train, tables, make_batches(9, 8), moves)[0] for moves in (True, False))
    assert all(torch.equal(moved[k], still[k]) for k in moved)


def train_uneven(group, tables, batches, prefetch, uneven):
    embeddings = build(group, tables, batches, 0)
    model, seen = Model(embeddings), 0
    mine = batches[: 3 + 2 * group.rank]
    with PrefetchPipeline(model, None, embeddings, enabled=prefetch, uneven=uneven) as pipe:
        for batch in pipe(mine):
            model(batch).mean().backward()
            seen += 1
    return seen


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_rank_that_runs_out_of_data_stops_all(pools, tables, make_batches, prefetch):
    assert pools(2).run(train_uneven, tables, make_batches(6, 8), prefetch, "stop") == [3, 3]
    with pytest.raises(PipelineError, match=r"ranks \[0\] have no more batches"):
        pools(2).run(train_uneven, tables, make_batches(6, 8), prefetch, "error")


def other_tables(group, tables):
    mine = tables if group.rank == 0 else tables[:2]
    TieredEmbeddingBagCollection(mine, None, SGD(0.1), group)


def other_plan(group, tables, batches):
    other = [EmbeddingBagConfig("film", 61, 8, ["seen"]), *tables[1:]]
    TieredEmbeddingBagCollection(tables, hot_plan(other, [], 0, group.size), SGD(0.1), group)


def test_disagreement_is_an_error_on_every_rank(pools, tables, make_batches):
    with pytest.raises(PlanMismatchError, match="different tables"):
        pools(2).run(other_tables, tables)
    with pytest.raises(PlanMismatchError, match="the plan is for the tables"):
        pools(2).run(other_plan, tables, make_batches(1, 8))


def one_rank_stops(group, tables, batches):
    embeddings = build(group, tables, batches, 0)
    if group.rank == 0:
        embeddings(batches[0])


def test_a_missing_rank_is_an_error_and_no_hang(tables, make_batches):
    from core_kernels.launch import run_ranks

    with pytest.raises((CollectiveError, Exception), match="counts"):
        run_ranks(one_rank_stops, 2, tables, make_batches(1, 8), timeout_seconds=3.0)


def read_between_steps(group, tables, batches, prefetch):
    embeddings, seen = build(group, tables, batches, 10), []
    model = Model(embeddings)
    with PrefetchPipeline(model, None, embeddings, enabled=prefetch) as pipe:
        for batch in pipe(batches):
            model(batch).mean().backward()
            embeddings.eval()
            with torch.no_grad():
                seen.append(model(batches[0]))
            embeddings.train()
    return seen


def test_reading_between_steps_sees_all_updates(pools, tables, make_batches):
    ahead, plain = (pools(2).run(read_between_steps, tables, make_batches(5, 8), p)[0] for p in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(ahead, plain, strict=True))


def misuse(group, tables, batches, how):
    embeddings = build(group, tables, batches, 0)
    model = Model(embeddings)
    with PrefetchPipeline(model, None, embeddings) as pipe:
        for batch in pipe(batches):
            if how == "foreign":
                model(batches[3])
            elif how == "retier":
                embeddings.retier(embeddings.plan)
            elif how == "no backward":
                model(batch)


@pytest.mark.parametrize("how", ["foreign", "retier", "no backward"])
def test_misuse_of_a_pipeline_is_named(pools, tables, make_batches, how):
    with pytest.raises(PipelineError):
        pools(2).run(misuse, tables, make_batches(4, 8), how)


def leave_early(group, tables, batches):
    embeddings = build(group, tables, batches, 10)
    model = Model(embeddings)
    with PrefetchPipeline(model, None, embeddings) as pipe:
        for number, batch in enumerate(pipe(batches)):
            model(batch).mean().backward()
            if number == 2:
                break
    early = gather_tables(embeddings)
    other = build(group, tables, batches, 10)
    model.embeddings = other
    for batch in batches[:3]:
        model(batch).mean().backward()
    plain = gather_tables(other)
    return all(torch.equal(early[k], plain[k]) for k in early) and embeddings.step == other.step == 3


def test_leaving_a_loop_early_loses_no_update(pools, tables, make_batches):
    assert all(pools(2).run(leave_early, tables, make_batches(6, 8)))


def bad_batch(group, tables, kind):
    embeddings = TieredEmbeddingBagCollection(tables, None, SGD(0.1), group)
    keys, lengths = ["who", "seen", "tags", "liked"], torch.tensor([1, 1, 1, 1])
    ids = torch.tensor([{"high": 25, "negative": -1}.get(kind, 3), 1, 1, 1])
    weights = torch.tensor([1.0, float("nan"), 1.0, 1.0]) if kind == "nan" else None
    embeddings(KeyedJaggedTensor(keys, ids, lengths, weights))


def test_bad_batches_are_named(pools, tables):
    for kind, error, words in (
        ("high", IdRangeError, r"feature 'who' holds the id 25.*\[0, 25\).*'user'"),
        ("negative", IdRangeError, "holds the id -1"),
        ("nan", InputError, r"weights\[1\]=nan"),
    ):
        with pytest.raises(error, match=words):
            pools(2).run(bad_batch, tables, kind)
