"""Frontier Tracking: the exact Pareto frontier of a search problem by elimination."""

from autopar.tracking.track import track, track_all

__all__ = ["track", "track_all"]
