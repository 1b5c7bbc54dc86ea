"""dataplane moves rows between the stages of RL post-training, without a controller.

`connect()` attaches to this host's peer, or starts one. `dataplane.aio` has the same interface with
`await`.
"""

import sys
from typing import TYPE_CHECKING
from typing import Any as _Any

if sys.platform != "linux":
    raise ImportError(
        f"dataplane runs only on Linux, not on {sys.platform}: it needs memfd_create and "
        "pidfd_open. Run it in a Linux container or on a remote host"
    )

from dataplane import errors
from dataplane.errors import *
from dataplane.version import __version__

if TYPE_CHECKING:
    from dataplane.surface import *
else:

    def __getattr__(name: str) -> _Any:
        """Load a public name on first use: a peer imports this package, but not the client."""
        if name not in __all__:
            raise AttributeError(f"module 'dataplane' has no attribute {name!r}", name=name)
        from dataplane import surface

        found = globals()[name] = getattr(surface, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Batch",
    "Dropped",
    "Event",
    "Group",
    "Loader",
    "Micro",
    "Mini",
    "Partition",
    "Plan",
    "Plane",
    "Ref",
    "Rows",
    "Stream",
    "Tag",
    "Where",
    "__version__",
    "aio",
    "connect",
    "errors",
    "object",
    "tag",
]
__all__ += errors.__all__
