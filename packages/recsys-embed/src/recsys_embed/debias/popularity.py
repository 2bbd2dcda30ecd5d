"""Popularity of items: among all users, and among the users most like one.

Personal popularity is the share of a user's nearest users (by cosine of what they took) who took the item. Most pairs
are 0, so it is kept sparse: users are handled in blocks, and no matrix of users by items is ever dense.

Source: "Popularity Debiasing from Exposure to Interaction in Collaborative Filtering" and its line of work on personal
popularity with counterfactual inference (PPAC).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from recsys_embed.data.ratings import Ratings
from recsys_embed.errors import input_error

__all__ = ["Interactions", "global_popularity", "personal_popularity"]


@dataclass(frozen=True)
class Interactions:
    """Who took what: a sparse 0/1 matrix [users, items] for training, validation and test each."""

    training: Any
    validation: Any
    test: Any

    @classmethod
    def split(cls, ratings: Ratings, seed: int = 0, threshold: float = 0.0) -> Interactions:
        """Divide every user's items at random: 70 % training, 10 % validation, 20 % test."""
        kept = ratings.values >= threshold
        users, items = ratings.users[kept], ratings.items[kept]
        generator = np.random.default_rng(seed)
        order = np.lexsort((generator.random(len(users)), users))
        users, items = users[order], items[order]
        starts = np.searchsorted(users, users, side="left")
        lengths = np.searchsorted(users, users, side="right") - starts
        place = (np.arange(len(users)) - starts + 0.5) / lengths
        parts = (place < 0.7, (place >= 0.7) & (place < 0.8), place >= 0.8)
        shape = (ratings.num_users, ratings.num_items)
        return cls(*(_matrix(users[part], items[part], shape) for part in parts))


def _matrix(users: np.ndarray, items: np.ndarray, shape: tuple[int, int]) -> Any:
    return scipy.sparse.coo_array((np.ones(len(users), np.float32), (users, items)), shape=shape).tocsr()


def global_popularity(taken: Any) -> np.ndarray:
    """Return how many users took each item, over the largest count, float32 [items].

    >>> global_popularity(scipy.sparse.csr_array(np.array([[1, 0], [1, 1]], np.float32))).tolist()
    [1.0, 0.5]
    """
    counts = np.asarray(taken.sum(axis=0)).reshape(-1).astype(np.float32)
    return counts / max(float(counts.max(initial=0)), 1.0)


def personal_popularity(taken: Any, num_neighbors: int = 30, block_users: int = 1024) -> Any:
    """Return the share of every user's nearest users who took each item.

    Args:
        taken: 0/1 matrix [users, items].
        num_neighbors: Nearest users, by cosine similarity; the user is not among them, ties go to the lower number.
        block_users: Users handled at once.

    Returns:
        Sparse [users, items], values in [0, 1].

    Cost: memory of one block's similarities, which are as dense as users overlap.
    """
    if num_neighbors < 1:
        raise input_error("num_neighbors", num_neighbors, "at least 1", "30 is usual")
    lengths = np.sqrt(np.asarray(taken.sum(axis=1)).reshape(-1))
    scaled: Any = scipy.sparse.diags_array(1 / np.maximum(lengths, 1)) @ taken
    transposed = scaled.T.tocsr()
    blocks = []
    for start in range(0, taken.shape[0], block_users):
        similar = (scaled[start : start + block_users] @ transposed).tocsr()
        nearest = _nearest(similar, start, num_neighbors)
        blocks.append((nearest @ taken) / num_neighbors)
    return scipy.sparse.vstack(blocks).tocsr().astype(np.float32)


def _nearest(similar: Any, first_user: int, num_neighbors: int) -> Any:
    """Return a 0/1 matrix of the most similar others of each row."""
    rows: list[Any] = []
    columns: list[Any] = []
    for row in range(similar.shape[0]):
        span = slice(similar.indptr[row], similar.indptr[row + 1])
        others, values = similar.indices[span], similar.data[span]
        kept = (others != first_user + row) & (values > 0)
        others, values = others[kept], values[kept]
        best = others[np.lexsort((others, -values))[:num_neighbors]]
        rows.append(np.full(len(best), row))
        columns.append(best)
    places = (np.concatenate(rows), np.concatenate(columns))
    ones = np.ones(len(places[0]), np.float32)
    return scipy.sparse.coo_array((ones, places), shape=similar.shape).tocsr()
