"""Frontier Tracking: the exact Pareto frontier of a search problem by elimination."""

from autopar.tracking.track import track

__all__ = ["track"]
