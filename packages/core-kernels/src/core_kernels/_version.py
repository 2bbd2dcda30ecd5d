"""The version of this package, read by the build and by the release check."""

__version__ = "0.1.0"
