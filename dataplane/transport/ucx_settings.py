"""How UCX is set up in a bulk worker, whoever loads it: settings of the user's come first.

- Its TCP is left out: slower than ours wherever it was measured, and its listeners take anybody.
- Error handling would silently leave out shared memory (7 → 0.7 GB/s); with it allowed both stay.
- Without NVLink, reads between GPUs are off unless asked for (0.5 against 49 GB/s reported).
- It warns of variables that it does not know: of another release's, for one.
- It logs to standard output, which is not ours to write to.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SETTINGS = {
    "UCX_TLS": "^tcp",
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_FILE": "stderr",
}


def settle(environ: MutableMapping[str, str] = os.environ) -> None:
    """To be called before UCX is loaded: it reads its variables once."""
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
