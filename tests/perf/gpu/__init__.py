"""Values on a GPU, and on their way to one, beside what the GPU does without this library:
`python -m bench perf --only gpu`.

| idea | file |
|---|---|
| what is measured, and against what | figures |
| between the devices of two peers, by transport | ways |
| the GPU: its arrays and its bare copies | device |
"""

from __future__ import annotations

from tests.perf.gpu import ways
from tests.perf.gpu.device import missing
from tests.perf.gpu.figures import measure, report_of

__all__ = ["measure", "missing", "report_of", "ways"]
