"""Ways to start the workers of a job: on this host."""

from elastic_train.launchers.local import LocalJob

__all__ = ["LocalJob"]
