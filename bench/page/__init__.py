"""The report: one HTML file with everything in it, drawn here, without a library or a network."""

from bench.page.document import load, write

__all__ = ["load", "write"]
