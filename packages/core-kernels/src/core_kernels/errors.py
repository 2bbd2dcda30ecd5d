"""Errors that say what was wrong, what was expected and what to do.

Every error of this package derives from :class:`CoreKernelsError`. Faults in arguments also derive from the builtin a
Python user would catch, so ``except ValueError`` keeps working. Messages have three parts: the fact with names and
values, the expectation with the numbers put in, the remedy.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CollectiveError",
    "CoreKernelsError",
    "MissingDependencyError",
    "argument_error",
    "index_bounds_error",
]


class CoreKernelsError(Exception):
    """Base class of all errors raised by core-kernels."""


class ArgumentError(CoreKernelsError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(CoreKernelsError, TypeError):
    """An argument has a type or dtype that cannot be used."""


class MissingDependencyError(CoreKernelsError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


class CollectiveError(CoreKernelsError, RuntimeError):
    """A collective failed or was late.

    Attributes:
        rank: Rank that raised, in its group.
        world_size: Number of ranks of the group.
        collective: Name of the operation, for example ``"all_to_all_v"``.
        tag: The caller's label of this operation.
        seconds: Seconds waited before giving up.
    """

    def __init__(self, message: str, *, rank: int, world_size: int, collective: str, tag: str, seconds: float):
        self.rank, self.world_size, self.collective, self.tag, self.seconds = rank, world_size, collective, tag, seconds
        super().__init__(
            f"rank {rank} of {world_size}: {collective} (tag {tag!r}) failed after {seconds:.1f} s: {message}"
        )

    def __reduce__(self):
        # Exceptions cross process borders by their arguments; ours are keywords.
        return _rebuild_collective_error, (str(self), self.__dict__.copy())


def _rebuild_collective_error(text: str, fields: dict) -> CollectiveError:
    error = CollectiveError.__new__(CollectiveError)
    RuntimeError.__init__(error, text)
    error.__dict__.update(fields)
    return error


def argument_error(name: str, value: object, expected: str, remedy: str) -> ArgumentError:
    """Build the three-part message for a bad argument value.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed; shortened when its ``repr`` is long.
        expected: The condition that does not hold, with numbers put in.
        remedy: What the caller can do, an imperative clause.

    Returns:
        The error, to be raised by the caller.

    >>> str(argument_error("num_parts", 0, "an integer of at least 1", "pass the number of ranks"))
    'num_parts=0 is not valid: expected an integer of at least 1; pass the number of ranks'
    """
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return ArgumentError(f"{name}={shown} is not valid: expected {expected}; {remedy}")


def index_bounds_error(op: str, name: str, value: int, bound: int) -> ArgumentError:
    """Build the message for an id outside ``[0, bound)``.

    >>> str(index_bounds_error("gather", "index", 7, 7))
    'gather: index holds 7, outside [0, 7); pass ids below 7, or bounds="unchecked" to skip this test'
    """
    return ArgumentError(
        f"{op}: {name} holds {value}, outside [0, {bound}); "
        f'pass ids below {bound}, or bounds="unchecked" to skip this test'
    )
