"""Recommendations with less popularity bias: personal popularity and counterfactual inference (PPAC)."""

from __future__ import annotations

from recsys_embed.debias.backbones import BPRMF, LightGCN
from recsys_embed.debias.metrics import RankingReport, rank_items
from recsys_embed.debias.popularity import Interactions, global_popularity, personal_popularity
from recsys_embed.debias.training import DebiasJob, Recommender, run_debias

__all__ = [
    "BPRMF",
    "DebiasJob",
    "Interactions",
    "LightGCN",
    "RankingReport",
    "Recommender",
    "global_popularity",
    "personal_popularity",
    "rank_items",
    "run_debias",
]
