"""Errors of autopar: one base class, argument faults also derive from ``ValueError``."""

from __future__ import annotations

from core_kernels.errors import ArgumentError

__all__ = ["AutoparError", "InfeasibleError", "ProblemError"]


class AutoparError(Exception):
    """Base class of all errors raised by autopar."""


class ProblemError(AutoparError, ArgumentError):
    """A problem, graph or option that cannot be searched."""


class InfeasibleError(AutoparError, ArgumentError):
    """No plan fits the budget; the message names the least memory possible."""
