"""Scheduling of elastic jobs on a shared cluster: policies, a trace-driven simulator, and readers of public traces."""

from elastic_train.scheduler.jobs import JobTable, Workload, amdahl_curve
from elastic_train.scheduler.policies import POLICIES, policy
from elastic_train.scheduler.simulator import Cluster, Outcome, Policy, simulate
from elastic_train.scheduler.traces import StepModel, read_alibaba, read_philly, read_pollux, read_tiresias

__all__ = [
    "POLICIES",
    "Cluster",
    "JobTable",
    "Outcome",
    "Policy",
    "StepModel",
    "Workload",
    "amdahl_curve",
    "policy",
    "read_alibaba",
    "read_philly",
    "read_pollux",
    "read_tiresias",
    "simulate",
]
