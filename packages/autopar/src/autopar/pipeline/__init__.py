"""Pipelines on top of frontiers: a captured step cut into stages, each with its own plan, planned, played and run."""

from __future__ import annotations

from autopar.pipeline.execution import PipelineModule, apply
from autopar.pipeline.hosts import Host
from autopar.pipeline.microbatches import cut_batch
from autopar.pipeline.plan import PipelineFrontier, PipelinePlan, StagePlan, UnitPlan
from autopar.pipeline.planner import search
from autopar.pipeline.schedule import Simulation, bound_seconds, in_flight, simulate
from autopar.pipeline.units import find_units
from autopar.pipeline.verification import verify

__all__ = [
    "Host",
    "PipelineFrontier",
    "PipelineModule",
    "PipelinePlan",
    "Simulation",
    "StagePlan",
    "UnitPlan",
    "apply",
    "bound_seconds",
    "cut_batch",
    "find_units",
    "in_flight",
    "search",
    "simulate",
    "verify",
]
