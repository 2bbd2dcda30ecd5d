"""Plans and runs full-graph embedding exchange over the real topology."""

from gnn_comm._version import __version__

__all__ = ["__version__"]
