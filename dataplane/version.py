"""The version of this dataplane, also where it runs from a tree that is not installed."""

__version__ = "0.1.0.dev0"
