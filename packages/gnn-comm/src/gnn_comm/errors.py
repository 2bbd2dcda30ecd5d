"""Errors of this package; all derive from :class:`GnnCommError`."""

from __future__ import annotations

__all__ = ["GnnCommArgumentError", "GnnCommError", "PlanCheckError", "PlanMismatchError"]


class GnnCommError(Exception):
    """Base class of all errors raised by gnn-comm."""


class GnnCommArgumentError(GnnCommError, ValueError):
    """An argument has a value that cannot be used."""


class PlanMismatchError(GnnCommError, ValueError):
    """A plan was made for another graph, partition, topology or world size than it is used with."""


class PlanCheckError(GnnCommError, ValueError):
    """A plan does not do what it must.

    Attributes:
        faults: One sentence per fault found, the first few of each kind.
    """

    def __init__(self, faults: list[str]):
        self.faults = list(faults)
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        super().__init__(
            f"the plan has {len(faults)} fault{'s' if len(faults) != 1 else ''}: {'; '.join(faults[:5])}{more}; "
            "expected every requested row to arrive exactly once; plan again"
        )

    def __reduce__(self):
        return PlanCheckError, (self.faults,)
