"""The version of dataplane, also in a source tree that is not installed."""

__version__ = "0.1.0.dev0"
