"""Adds and removes workers of a running PyTorch job without stopping it."""

from elastic_train._version import __version__

__all__ = ["__version__"]
