"""Checkpoints on disk, for when all workers of a job are lost; see :class:`Checkpoints`."""

from elastic_train.checkpoints.folder import CheckpointFolder
from elastic_train.checkpoints.keeper import Checkpoints

__all__ = ["CheckpointFolder", "Checkpoints"]
