"""Errors of autopar: one base class, argument faults also derive from ``ValueError``."""

from __future__ import annotations

from core_kernels.errors import ArgumentError

__all__ = ["AutoparError", "CaptureError", "InfeasibleError", "PlanMismatchError", "ProblemError", "VerificationError"]


class AutoparError(Exception):
    """Base class of all errors raised by autopar."""


class ProblemError(AutoparError, ArgumentError):
    """A problem, graph, mesh or option that cannot be searched."""


class CaptureError(AutoparError, ArgumentError):
    """A module that cannot be captured, or has operators without a rule."""


class InfeasibleError(AutoparError, ArgumentError):
    """No plan fits the budget; the message names the least memory possible."""


class PlanMismatchError(AutoparError, ArgumentError):
    """A plan made for another model, mesh or torch version."""


class VerificationError(AutoparError, RuntimeError):
    """An applied plan gave other numbers than one device, or other collectives than planned."""
