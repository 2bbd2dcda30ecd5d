"""Batch sizes, learning rates and numbers of workers that follow the training.

    loader = elastic_train.ElasticDataLoader(data, global_batch_size=64)
    adapt(GrowWithNoise(max_batch_size=1024), learning_rate=AdaScale())

Policies look at every step and wish; what all workers wish happens, after the same step on all of them. See
:mod:`elastic_train.adaptation.engine`.
"""

from elastic_train.adaptation.engine import Adaptation, adapt
from elastic_train.adaptation.noise import NoiseScale, estimate_noise
from elastic_train.adaptation.policies import (
    BatchSchedule,
    FollowThroughput,
    GrowWithNoise,
    Policy,
    StepReport,
    ThroughputMonitor,
    Wish,
)
from elastic_train.adaptation.rates import AdaScale, LearningRateRule, Legw, linear_rule, sqrt_rule

__all__ = [
    "AdaScale",
    "Adaptation",
    "BatchSchedule",
    "FollowThroughput",
    "GrowWithNoise",
    "LearningRateRule",
    "Legw",
    "NoiseScale",
    "Policy",
    "StepReport",
    "ThroughputMonitor",
    "Wish",
    "adapt",
    "estimate_noise",
    "linear_rule",
    "sqrt_rule",
]
