"""The report as one self-contained HTML file, and its pictures."""

from bench.page.document import load, write

__all__ = ["load", "write"]
