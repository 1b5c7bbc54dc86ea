"""Traces: how long every prompt, response and tool call of a step is, and what media it carries.

`tasks` has the parameters, `generator` draws from them, `parquet` keeps a trace in a file,
`polytrace` reads the suite's own files, `commands` shows what is in one.
"""

from __future__ import annotations

from bench.traces.generator import generate
from bench.traces.sample import PATCH_VALUES, Medium, Prompt, Sample, Turn
from bench.traces.tasks import TASKS, Task

__all__ = ["PATCH_VALUES", "TASKS", "Medium", "Prompt", "Sample", "Task", "Turn", "generate"]
