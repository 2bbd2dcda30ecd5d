"""Errors of this package: every message names the fact, what was expected and the remedy."""

from __future__ import annotations

from core_kernels.errors import CoreKernelsError

__all__ = ["EvaluationArgumentError", "GnnEvalError", "InexactPlanError", "UnsupportedModelError"]


class GnnEvalError(CoreKernelsError):
    """Base class of all errors raised by gnn-eval."""


class EvaluationArgumentError(GnnEvalError, ValueError):
    """An argument has a value that cannot be used."""


class UnsupportedModelError(GnnEvalError):
    """The model contains an operator whose result for one row depends on other rows.

    Attributes:
        operator: The operator that cannot be evaluated in parts, for example ``"aten.mean.dim"``.
        source: Module path, file, line and text of the model's code that called it.
    """

    def __init__(self, operator: str, reason: str, remedy: str, source: str = ""):
        self.operator, self.reason, self.remedy, self.source = operator, reason, remedy, source
        where = f" at {source}" if source else ""
        super().__init__(f"{operator}{where}: {reason}; {remedy}")

    def __reduce__(self):
        return type(self), (self.operator, self.reason, self.remedy, self.source)


class InexactPlanError(GnnEvalError):
    """The plan and the full forward differ on a random subgraph, so the plan is not used."""
