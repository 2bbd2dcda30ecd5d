"""Errors of elastic-train: what was wrong, what was expected with numbers put in, what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from core_kernels.errors import CoreKernelsError, argument_error

__all__ = [
    "CheckpointError",
    "ElasticError",
    "FencedError",
    "InputError",
    "JobStateError",
    "StateMismatchError",
    "StoreError",
    "WorkerLostError",
    "input_error",
    "located",
]


class ElasticError(CoreKernelsError):
    """Base class of all errors raised by elastic-train."""


class InputError(ElasticError, ValueError):
    """An argument has a value that cannot be used."""


class StoreError(ElasticError, RuntimeError):
    """The key-value store of a job cannot be reached or refuses a request."""


class JobStateError(ElasticError, RuntimeError):
    """A job is not in the state that a request needs: its id is taken, or another change is under way."""


class FencedError(ElasticError, RuntimeError):
    """A leader acted after another one was elected; what it wanted did not happen."""


class StateMismatchError(ElasticError, ValueError):
    """The state of a newcomer has other names, shapes or types than that of the running job."""


class CheckpointError(ElasticError, RuntimeError):
    """No checkpoint of a folder can be used, or none can be written there."""


class WorkerLostError(ElasticError, RuntimeError):
    """Workers were lost and the job cannot go on with those that are left."""


def input_error(name: str, value: object, expected: str, remedy: str) -> InputError:
    """Build the three-part message for a bad argument.

    >>> str(input_error("min_workers", 0, "at least 1", "ask for a worker"))
    'min_workers=0 is not valid: expected at least 1; ask for a worker'
    """
    return InputError(str(argument_error(name, value, expected, remedy)))


@contextmanager
def located(phase: str, worker: str, rank: int | None = None) -> Iterator[None]:
    """Add to errors of this package where they happened: host, worker, rank and phase.

    >>> with located("init", "w0"):  # doctest: +ELLIPSIS
    ...     raise InputError("limits=0 is not valid")
    Traceback (most recent call last):
    elastic_train.errors.InputError: limits=0 is not valid [host ..., worker w0, no rank yet, phase init]
    """
    try:
        yield
    except ElasticError as error:
        if "[host " in str(error):
            raise
        place = "no rank yet" if rank is None else f"rank {rank}"
        text = f"{error} [host {socket.gethostname()}, worker {worker}, {place}, phase {phase}]"
        raise type(error)(text) from error
