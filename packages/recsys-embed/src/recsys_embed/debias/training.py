"""Training with the two popularities in the model, and inference that sets their direct effect.

A pair's score in training is ``s * sigmoid(local) * sigmoid(global)``: s the backbone's dot product, local a bilinear
form of user and item, global a linear form of the item. The two are also pulled towards personal popularity PP and
global popularity GP, so that they take up what popularity explains. At inference the direct effect of popularity is
replaced: ``s * sigmoid(local) * sigmoid(global) + gamma * PP + beta * GP``, gamma and beta chosen on validation data
among settings that do not lean on popular items more than the plain backbone does. A negative beta takes back what an
item owes to popularity alone.

Loss: BPR on one drawn negative per positive, plus ``1e-3`` times the squared errors of PP and GP, plus L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_kernels.console import progress
from recsys_embed.data.ratings import Ratings, read_movielens
from recsys_embed.debias.backbones import BPRMF, LightGCN
from recsys_embed.debias.metrics import RankingReport, rank_items
from recsys_embed.debias.popularity import Interactions, global_popularity, personal_popularity

__all__ = ["DebiasJob", "Recommender", "run_debias"]

_BACKBONES = {"bprmf": BPRMF, "lightgcn": LightGCN}
_GAMMAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_BETAS = (-4.0, -2.0, -1.0, -0.5, 0.0)


@dataclass(frozen=True)
class DebiasJob:
    """What to train.

    Attributes:
        backbone: ``"bprmf"`` or ``"lightgcn"``.
        width: Length of vectors.
        epochs: Passes over the interactions.
        batch_size: Positives per step.
        learning_rate: Of Adam.
        num_neighbors: Users that make up personal popularity.
        popularity_weight: Of the squared errors.
        l2: Of the vectors used in a step.
        k: Length of recommendation lists.
        seed: Of initial values, split and negatives.
    """

    backbone: str = "bprmf"
    width: int = 64
    epochs: int = 30
    batch_size: int = 2048
    learning_rate: float = 0.003
    num_neighbors: int = 30
    popularity_weight: float = 1e-3
    l2: float = 1e-4
    k: int = 20
    seed: int = 0


class Recommender(nn.Module):
    """A backbone, with the two popularity gates when ``debiased``."""

    def __init__(self, backbone: BPRMF, debiased: bool):
        super().__init__()
        self.backbone, self.debiased = backbone, debiased
        width = backbone.users.embedding_dim
        self.local, self.local_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(()))
        self.across = nn.Linear(width, 1)

    def gates(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return sigmoid(local) and sigmoid(global) of vectors that belong together."""
        local = (users * self.local * items).sum(-1) + self.local_bias
        return local.sigmoid(), self.across(items).squeeze(-1).sigmoid()

    def pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the training scores of vectors that belong together."""
        score = (users * items).sum(-1)
        if not self.debiased:
            return score
        local, across = self.gates(users, items)
        return score * local * across

    def scorer(self, personal: Any, popularity: np.ndarray, gamma: float, beta: float) -> Callable[[Tensor], Tensor]:
        """Return a function from user numbers to scores [users, items]."""
        with torch.no_grad():
            users, items = self.backbone.vectors()
            across = self.across(items).squeeze(-1).sigmoid()
        shift = beta * torch.from_numpy(popularity)

        @torch.no_grad()
        def score(chosen: Tensor) -> Tensor:
            vectors = users[chosen]
            scores = vectors @ items.T
            if not self.debiased:
                return scores
            scores = scores * ((vectors * self.local) @ items.T + self.local_bias).sigmoid() * across + shift
            if gamma:
                scores += gamma * torch.from_numpy(personal[chosen.numpy()].toarray())
            return scores

        return score


def run_debias(job: DebiasJob, ratings: Ratings | None = None) -> dict[str, Any]:
    """Train a plain and a debiased model on the same data and compare them on held-out items.

    Args:
        job: What to train.
        ratings: The data; MovieLens when None.

    Returns:
        ``plain`` and ``debiased`` reports, and the chosen ``gamma`` and ``beta``.
    """
    data = Interactions.split(ratings or read_movielens(), job.seed)
    popularity = global_popularity(data.training)
    personal = personal_popularity(data.training, job.num_neighbors)
    models = {name: _train(job, data, popularity, personal, name == "debiased") for name in ("plain", "debiased")}
    seen = (data.training + data.validation).tocsr()

    def report(model: Recommender, gamma: float, beta: float, test: bool) -> RankingReport:
        score = model.scorer(personal, popularity, gamma, beta)
        hidden, wanted = (seen, data.test) if test else (data.training, data.validation)
        return rank_items(score, hidden, wanted, popularity, job.k)

    plain = report(models["plain"], 0, 0, test=False)
    tried = {(g, b): report(models["debiased"], g, b, test=False) for g in _GAMMAS for b in _BETAS}
    fair = {key: r for key, r in tried.items() if r.popularity_bias <= plain.popularity_bias}
    gamma, beta = max(fair or tried, key=lambda key: tried[key].recall)
    return {
        "backbone": job.backbone,
        "gamma": gamma,
        "beta": beta,
        "plain": asdict(report(models["plain"], 0, 0, test=True)),
        "debiased": asdict(report(models["debiased"], gamma, beta, test=True)),
    }


def _train(job: DebiasJob, data: Interactions, popularity: np.ndarray, personal: Any, debiased: bool) -> Recommender:
    torch.manual_seed(job.seed)
    generator = np.random.default_rng(job.seed)
    model = Recommender(_BACKBONES[job.backbone](data.training, job.width), debiased)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate)
    users, items = (np.asarray(c, np.int64) for c in data.training.tocoo().coords)
    with progress(f"{job.backbone} {'debiased' if debiased else 'plain'}", job.epochs) as advance:
        for _ in range(job.epochs):
            order = generator.permutation(len(users))
            for start in range(0, len(order), job.batch_size):
                chosen = order[start : start + job.batch_size]
                negatives = generator.integers(0, data.training.shape[1], len(chosen))
                optimizer.zero_grad()
                loss = _loss(job, model, users[chosen], items[chosen], negatives, popularity, personal)
                loss.backward()
                optimizer.step()
            advance()
    return model


def _loss(
    job: DebiasJob,
    model: Recommender,
    users: np.ndarray,
    positives: np.ndarray,
    negatives: np.ndarray,
    popularity: np.ndarray,
    personal: Any,
) -> Tensor:
    all_users, all_items = model.backbone.vectors()
    user, positive, negative = all_users[users], all_items[positives], all_items[negatives]
    loss = -nn.functional.logsigmoid(model.pairs(user, positive) - model.pairs(user, negative)).mean()
    square = user.square().sum() + positive.square().sum() + negative.square().sum()
    loss = loss + job.l2 * square / len(users)
    if model.debiased:
        for numbers, vectors in ((positives, positive), (negatives, negative)):
            local, across = model.gates(user, vectors)
            own = torch.from_numpy(np.asarray(personal[users, numbers]).reshape(-1))
            error = (local - own).square().mean() + (across - torch.from_numpy(popularity[numbers])).square().mean()
            loss = loss + job.popularity_weight * error
    return loss
