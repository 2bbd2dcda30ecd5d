"""Sharded embedding tables with a replicated hot tier and exact pre-fetching."""

from recsys_embed._version import __version__

__all__ = ["__version__"]
