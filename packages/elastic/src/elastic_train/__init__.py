"""Adds and removes workers of a running PyTorch job without stopping it."""

from elastic_train._version import __version__
from elastic_train.controller import Controller
from elastic_train.data import ElasticDataLoader
from elastic_train.errors import ElasticError
from elastic_train.job import Job, StepInfo
from elastic_train.optimizer import Optimizer
from elastic_train.session import current_job, init, notify_batch_end, on_resize, wrap
from elastic_train.shards import ShardQueue
from elastic_train.state import State

__all__ = [
    "Controller",
    "ElasticDataLoader",
    "ElasticError",
    "Job",
    "Optimizer",
    "ShardQueue",
    "State",
    "StepInfo",
    "__version__",
    "current_job",
    "init",
    "notify_batch_end",
    "on_resize",
    "wrap",
]
