"""The click models learn, and the debiased recommender leans less on popular items."""

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

from core_kernels.comm import Group
from recsys_embed import RowWiseAdagrad, TieredEmbeddingBagCollection
from recsys_embed.data import FieldSpec, make_clicks
from recsys_embed.data.ratings import Ratings
from recsys_embed.debias import DebiasJob, Interactions, global_popularity, personal_popularity, rank_items, run_debias
from recsys_embed.debias.training import Recommender
from recsys_embed.models import MODELS, make_model
from recsys_embed.training import evaluate


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_dense", [0, 4])
def test_models_learn_clicks(name, num_dense):
    torch.manual_seed(0)
    data = make_clicks(4000, [FieldSpec("a", 40), FieldSpec("b", 30)], num_dense=num_dense)
    emb = TieredEmbeddingBagCollection(data.tables(8), None, RowWiseAdagrad(0.1), Group.single())
    model = make_model(name, emb, num_dense, (16, 8))
    dense, criterion = torch.optim.Adagrad(model.parameters(), lr=0.05), nn.BCEWithLogitsLoss()
    for epoch in range(4):
        for batch in data.batches(200, seed=0, epoch=epoch):
            dense.zero_grad()
            criterion(model(batch), batch.labels).backward()
            dense.step()
    assert evaluate(Group.single(), model, data, 500) > 0.65


def small_ratings(num_users=60, num_items=80, seed=0):
    generator = np.random.default_rng(seed)
    taste = generator.integers(0, 4, num_users)
    popular = 1 / np.arange(1, num_items + 1)
    users, items = [], []
    for user in range(num_users):
        chance = popular * np.where(np.arange(num_items) % 4 == taste[user], 6, 1)
        chosen = generator.choice(num_items, 20, replace=False, p=chance / chance.sum())
        users += [user] * 20
        items += chosen.tolist()
    values = np.full(len(users), 5, np.float32)
    return Ratings(np.array(users), np.array(items), values, np.arange(len(users)), num_users, num_items)


def test_personal_popularity_is_that_of_dense_arithmetic():
    data = Interactions.split(small_ratings())
    taken = data.training.toarray()
    lengths = np.sqrt(taken.sum(1))
    similar = taken @ taken.T / np.outer(lengths, lengths)
    np.fill_diagonal(similar, -1)
    expected = np.zeros_like(taken)
    for user in range(len(taken)):
        nearest = [v for v in np.lexsort((np.arange(len(taken)), -similar[user].round(6)))[:5] if similar[user, v] > 0]
        expected[user] = taken[nearest].sum(0) / 5
    found = personal_popularity(data.training, 5, block_users=17)
    assert scipy.sparse.issparse(found)
    agreement = (np.abs(found.toarray() - expected).max(1) < 1e-6).mean()
    assert agreement > 0.9  # equal similarities may be told apart by rounding


def test_split_and_metrics():
    data = Interactions.split(small_ratings())
    total = data.training + data.validation + data.test
    assert total.max() == 1
    assert (data.training.nnz, data.test.nnz) == (60 * 14, 60 * 4)
    popularity = global_popularity(data.training)
    perfect = rank_items(
        lambda u: torch.from_numpy(data.test[u.numpy()].toarray()), data.training, data.test, popularity
    )
    popular = rank_items(
        lambda u: torch.from_numpy(popularity).expand(len(u), -1), data.training, data.test, popularity
    )
    assert (perfect.recall, perfect.ndcg) == pytest.approx((1.0, 1.0))
    assert popular.recall < 1
    assert popular.popularity_bias > perfect.popularity_bias


def test_gates_change_scores_only_when_debiased():
    data = Interactions.split(small_ratings())
    from recsys_embed.debias import BPRMF

    plain, gated = (Recommender(BPRMF(data.training, 8), debiased) for debiased in (False, True))
    gated.load_state_dict(plain.state_dict())
    popularity, users = global_popularity(data.training), torch.arange(3)
    scores = [m.scorer(data.training, popularity, 1.0, -1.0)(users) for m in (plain, gated)]
    assert not torch.allclose(*scores)
    shifted = gated.scorer(data.training, popularity, 1.0, 0.0)(users) - torch.from_numpy(popularity)
    torch.testing.assert_close(shifted, scores[1])


@pytest.mark.parametrize("backbone", ["bprmf", "lightgcn"])
def test_debiasing_runs_and_lowers_the_bias(backbone):
    result = run_debias(DebiasJob(backbone, width=16, epochs=8, batch_size=256, learning_rate=0.01), small_ratings())
    assert result["debiased"]["popularity_bias"] <= result["plain"]["popularity_bias"] + 0.1
    assert result["plain"]["recall"] > 0.2
