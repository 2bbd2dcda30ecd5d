"""Rows of features in tiers: device memory, host memory and disk behind one table of positions."""

from __future__ import annotations

from core_kernels.store.disk import NpyRows
from core_kernels.store.feature_store import FeatureStore
from core_kernels.store.placement import Placement, place_by_hotness
from core_kernels.store.tiers import TierCounters

__all__ = ["FeatureStore", "NpyRows", "Placement", "TierCounters", "place_by_hotness"]
