"""Pulls over each transport beside its engine's bare loop: `python -m bench perf --transports`.

| idea | file |
|---|---|
| the transports and sizes, one after another; what is not run, and why | lanes |
| pulls between two peers, timed and counted | pulls |
| an engine between two processes, without this library | loops, engines |
| the figures of the report | told |
"""

from __future__ import annotations

from tests.perf.transports.lanes import TRANSPORTS, measure
from tests.perf.transports.shapes import SHAPES, Shape

__all__ = ["SHAPES", "TRANSPORTS", "Shape", "measure"]
