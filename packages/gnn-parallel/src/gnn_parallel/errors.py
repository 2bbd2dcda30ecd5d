"""Errors of gnn-parallel: what was wrong, what was expected with numbers put in, what to do."""

from __future__ import annotations

from core_kernels.errors import CoreKernelsError, argument_error

__all__ = ["GnnParallelError", "InputError", "PlanMismatchError", "UnsupportedLayerError", "input_error"]


class GnnParallelError(CoreKernelsError):
    """Base class of all errors raised by gnn-parallel."""


class InputError(GnnParallelError, ValueError):
    """An argument has a value that cannot be used."""


class PlanMismatchError(GnnParallelError, ValueError):
    """A plan does not belong to the graph, partition or number of ranks it is used with."""


class UnsupportedLayerError(GnnParallelError, TypeError):
    """A layer cannot run under the strategy that was asked for; the message says what it lacks."""


def input_error(name: str, value: object, expected: str, remedy: str) -> InputError:
    """Build the three-part message for a bad argument.

    >>> str(input_error("strategy", "best", "one of gdp, nfp, snp, dnp", "correct the spelling"))
    "strategy='best' is not valid: expected one of gdp, nfp, snp, dnp; correct the spelling"
    """
    return InputError(str(argument_error(name, value, expected, remedy)))
