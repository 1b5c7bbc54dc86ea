"""The report: one HTML file with everything in it, which fetches nothing; and its pictures."""

from bench.page.document import load, write

__all__ = ["load", "write"]
