"""The time-memory frontier of parallel plans for any nn.Module, and the chosen plan applied."""

from autopar._version import __version__

__all__ = ["__version__"]
