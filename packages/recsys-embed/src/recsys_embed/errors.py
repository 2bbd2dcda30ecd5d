"""Errors of recsys-embed: what was wrong, what was expected with numbers put in, what to do."""

from __future__ import annotations

from core_kernels.errors import CoreKernelsError, argument_error

__all__ = ["IdRangeError", "InputError", "PipelineError", "PlanMismatchError", "RecsysEmbedError", "input_error"]


class RecsysEmbedError(CoreKernelsError):
    """Base class of all errors raised by recsys-embed."""


class InputError(RecsysEmbedError, ValueError):
    """An argument has a value that cannot be used."""


class IdRangeError(InputError, IndexError):
    """An id lies outside its table."""


class PlanMismatchError(RecsysEmbedError, ValueError):
    """A plan, or a rank, does not belong to the tables or the number of ranks it is used with."""


class PipelineError(RecsysEmbedError, RuntimeError):
    """Steps came in an order that pre-fetching cannot follow."""


def input_error(name: str, value: object, expected: str, remedy: str) -> InputError:
    """Build the three-part message for a bad argument.

    >>> str(input_error("pooling", "max", "sum or mean", "choose one of them"))
    "pooling='max' is not valid: expected sum or mean; choose one of them"
    """
    return InputError(str(argument_error(name, value, expected, remedy)))
