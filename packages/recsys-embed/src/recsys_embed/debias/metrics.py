"""How good a ranking is, and how much it leans on popular items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RankingReport", "rank_items"]


@dataclass(frozen=True)
class RankingReport:
    """Averages over users who have something to find.

    Attributes:
        recall: Share of a user's items among the first k.
        ndcg: Discounted gain over the best possible.
        popularity_bias: Mean popularity (users, over the most popular item's) of recommended items over that of the
            items found in the data; 1 means no more popular than what people took.
        coverage: Share of items recommended to anybody.
    """

    recall: float
    ndcg: float
    popularity_bias: float
    coverage: float


def rank_items(
    score: Callable[[Tensor], Tensor],
    seen: Any,
    wanted: Any,
    popularity: np.ndarray,
    k: int = 20,
    block_users: int = 256,
) -> RankingReport:
    """Rank the items that users have not seen and compare with what they wanted.

    Args:
        score: Takes user numbers, returns scores [users, items].
        seen: 0/1 matrix of items left out of the ranking.
        wanted: 0/1 matrix of items to find.
        popularity: [items].
        k: Length of the lists.
        block_users: Users scored at once.
    """
    users = np.diff(wanted.indptr).nonzero()[0]
    recalls, gains, biases, shown = [], [], [], []
    discount = 1 / np.log2(np.arange(2, k + 2))
    for start in range(0, len(users), block_users):
        block = users[start : start + block_users]
        scores = score(torch.from_numpy(block)).clone()
        taken = seen[block].tocoo()
        scores[
            torch.from_numpy(taken.coords[0].astype(np.int64)), torch.from_numpy(taken.coords[1].astype(np.int64))
        ] = -torch.inf
        best = scores.topk(k, dim=1).indices.numpy()
        target = wanted[block]
        hits = np.stack([np.asarray(target[row, best[row]].todense()).reshape(-1) for row in range(len(block))]) > 0
        sizes = np.diff(target.indptr)
        recalls.append(hits.sum(1) / sizes)
        ideal = np.array([discount[: min(k, size)].sum() for size in sizes])
        gains.append((hits * discount).sum(1) / ideal)
        own = (target @ popularity) / sizes
        biases.append(popularity[best].mean(1) / np.maximum(own, 1e-12))
        shown.append(np.unique(best))
    coverage = len(np.unique(np.concatenate(shown))) / len(popularity)
    recall, ndcg, bias = (float(np.concatenate(x).mean()) for x in (recalls, gains, biases))
    return RankingReport(recall, ndcg, bias, coverage)
