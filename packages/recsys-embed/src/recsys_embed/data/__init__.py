"""Click and rating data: readers of the usual files, and a generator with a given skew."""

from __future__ import annotations

from recsys_embed.data.click_files import read_avazu, read_criteo_tsv, read_npy_days, read_parquet
from recsys_embed.data.clicks import ClickData
from recsys_embed.data.ratings import Ratings, read_movielens, read_ratings
from recsys_embed.data.synthetic import FieldSpec, make_clicks

__all__ = [
    "ClickData",
    "FieldSpec",
    "Ratings",
    "make_clicks",
    "read_avazu",
    "read_criteo_tsv",
    "read_movielens",
    "read_npy_days",
    "read_parquet",
    "read_ratings",
]
