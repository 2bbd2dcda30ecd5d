"""Experts placed from token statistics: which to copy where, where the rest live, and what that is worth, simulated."""

from __future__ import annotations

from autopar.experts.layer import ExpertLayer, Placement, StepCost, plain_placement
from autopar.experts.planner import ExpertPlan, ExpertPlanner, plan
from autopar.experts.search import place_experts, shadow_experts
from autopar.experts.simulator import Report, simulate
from autopar.experts.statistics import (
    TokenCounter,
    expected_counts,
    load_counts,
    save_counts,
    similarity,
    zipf_counts,
)

__all__ = [
    "ExpertLayer",
    "ExpertPlan",
    "ExpertPlanner",
    "Placement",
    "Report",
    "StepCost",
    "TokenCounter",
    "expected_counts",
    "load_counts",
    "place_experts",
    "plain_placement",
    "plan",
    "save_counts",
    "shadow_experts",
    "similarity",
    "simulate",
    "zipf_counts",
]
