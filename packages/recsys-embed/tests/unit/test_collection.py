"""One rank: pooling, gradients, policies, the plain baseline, and what is refused."""

import pytest
import torch
from torch import nn

from core_kernels.comm import Group
from recsys_embed import (
    SGD,
    EmbeddingBagConfig,
    InputError,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    TieredEmbeddingBagCollection,
    make_optimizer,
)
from recsys_embed.checkpoint import gather_tables
from recsys_embed.optimizers import OPTIMIZERS
from recsys_embed.tables import RowLayout
from recsys_embed.verify import Case, compare, mean_squares, reference_tables, run_case


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pooling_equals_embedding_bags(tables, make_batches, weighted, dtype):
    emb = TieredEmbeddingBagCollection(tables, None, SGD(0.1), Group.single(), dtype=dtype)
    batch, whole = make_batches(1, 9, weighted=weighted)[0], gather_tables(emb)
    pooled = emb(batch)
    start = 0
    for number, key in enumerate(batch.keys()):
        lengths = batch.lengths()[number * 9 : (number + 1) * 9]
        stop = start + int(lengths.sum())
        table = next(t for t in tables if key in t.feature_names)
        rows = whole[f"{table.name}.weight"][batch.values()[start:stop]]
        if weighted:
            rows = rows * batch.weights_or_none()[start:stop, None].to(dtype)
        bags = torch.repeat_interleave(torch.arange(9), lengths)
        expected = torch.zeros(9, table.embedding_dim, dtype=dtype).index_add_(0, bags, rows)
        if table.pooling == "mean":
            expected /= lengths.clamp(min=1).unsqueeze(1)
        torch.testing.assert_close(pooled[key], expected)
        start = stop


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_short_way_of_one_rank_is_within_rounding(tables, make_batches, name):
    batches, case = make_batches(6, 16), Case(0, False, name, deterministic=False, weight_decay=0.01)
    found = run_case(Group.single(), tables, batches, case)
    assert compare(found, reference_tables(tables, batches, case)).worst_relative < 1e-5


@pytest.mark.parametrize("width", [1, 3, 8, 64, 65])
def test_mean_of_squares_is_that_of_float64(width):
    rows = torch.randn(20, width, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(mean_squares(rows).double(), rows.double().square().mean(1), rtol=1e-6, atol=0)


def test_a_wrong_optimizer_is_noticed(tables, make_batches):
    batches, case = make_batches(4, 16), Case(0, False, "adagrad")
    found = run_case(Group.single(), tables, batches, case)
    wrong = reference_tables(tables, batches, Case(0, False, "adagrad", weight_decay=0.01))
    assert not compare(found, wrong).is_bitwise_equal


@pytest.mark.parametrize(("policy", "row"), [("clamp", 9), ("modulo", 2)])
def test_policies_map_ids_into_the_table(policy, row):
    tables = [EmbeddingBagConfig("t", 10, 4, ["f"])]
    emb = TieredEmbeddingBagCollection(tables, None, SGD(0.1), Group.single(), id_policy=policy)
    pooled = emb(KeyedJaggedTensor(["f"], torch.tensor([12]), torch.tensor([1])))
    assert torch.equal(pooled["f"][0], gather_tables(emb)["t.weight"][row])


def test_first_rows_depend_on_seed_table_and_row_alone():
    small, large = ([EmbeddingBagConfig("t", n, 4, ["f"], init_range=0.5)] for n in (10, 50))
    rows = [gather_tables(TieredEmbeddingBagCollection(t, group=Group.single()))["t.weight"] for t in (small, large)]
    assert torch.equal(rows[0], rows[1][:10])
    assert rows[1].abs().max() <= 0.5


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 1000, 99_991])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_places_are_a_bijection_spread_over_owners(num_rows, world_size):
    layout = RowLayout([EmbeddingBagConfig("t", num_rows, 4, ["f"])], world_size)
    places = layout.places(torch.arange(num_rows))
    assert torch.equal(places.sort().values, torch.arange(num_rows))
    assert torch.equal(layout.rows(places), torch.arange(num_rows))
    if num_rows >= 1000:  # the first rows are the popular ones in most data
        owners = torch.bucketize(places[: num_rows // 10], torch.from_numpy(layout.bounds[1:]), right=True)
        assert owners.bincount(minlength=world_size).max() <= 1.2 * num_rows / 10 / world_size


def test_gradients_reach_the_model_below_a_loss(tables, make_batches):
    emb = TieredEmbeddingBagCollection(tables, None, RowWiseAdagrad(0.1), Group.single())
    before, batch = gather_tables(emb), make_batches(1, 4)[0]
    before = {k: v.clone() for k, v in before.items()}
    nn.Linear(emb(batch).values().shape[1], 1)(emb(batch).values()).sum().backward()
    assert any(not torch.equal(before[k], v) for k, v in gather_tables(emb).items())


def test_what_is_refused(tables):
    with pytest.raises(InputError, match="'sum' or 'mean'"):
        EmbeddingBagConfig("t", 10, 4, ["f"], pooling="max")
    with pytest.raises(InputError, match="distinct names"):
        TieredEmbeddingBagCollection([tables[0], tables[0]], group=Group.single())
    with pytest.raises(InputError, match="power of two"):
        TieredEmbeddingBagCollection(tables, group=Group.single(), num_leaves=3)
    with pytest.raises(InputError, match="one of sgd"):
        make_optimizer("lion")
    emb = TieredEmbeddingBagCollection(tables, group=Group.single())
    with pytest.raises(InputError, match="pass every feature once"):
        emb(KeyedJaggedTensor(["who"], torch.tensor([1]), torch.tensor([1])))
