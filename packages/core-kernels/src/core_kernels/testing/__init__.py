"""Tools for testing distributed programs: reusable ranks, injected faults, and hosts joined by slow links."""

from __future__ import annotations

from core_kernels.testing import hosts
from core_kernels.testing.faults import Fault, FaultPlan
from core_kernels.testing.hosts import ShapedHosts
from core_kernels.testing.ranks import RankPool

__all__ = ["Fault", "FaultPlan", "RankPool", "ShapedHosts", "hosts"]
