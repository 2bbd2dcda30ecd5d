"""Scheduling of elastic jobs on a shared cluster: policies, a trace-driven simulator, and readers of public traces."""

from elastic_train.scheduler.jobs import JobTable, Workload, amdahl_curve
from elastic_train.scheduler.policies import POLICIES, STAGED_POLICIES, policy
from elastic_train.scheduler.simulator import Cluster, Outcome, Policy, simulate
from elastic_train.scheduler.staged import Stage, StagedJob, StagedOutcome, random_staged, read_staged, simulate_staged
from elastic_train.scheduler.traces import StepModel, read_alibaba, read_philly, read_pollux, read_tiresias

__all__ = [
    "POLICIES",
    "STAGED_POLICIES",
    "Cluster",
    "JobTable",
    "Outcome",
    "Policy",
    "Stage",
    "StagedJob",
    "StagedOutcome",
    "StepModel",
    "Workload",
    "amdahl_curve",
    "policy",
    "random_staged",
    "read_alibaba",
    "read_philly",
    "read_pollux",
    "read_staged",
    "read_tiresias",
    "simulate",
    "simulate_staged",
]
