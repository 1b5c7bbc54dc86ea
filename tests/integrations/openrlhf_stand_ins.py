"""Empty modules in place of what OpenRLHF imports and only a GPU has. Nothing calls into them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

MISSING = ("vllm", "deepspeed", "flash_attn", "ring_flash_attn", "bitsandbytes", "liger_kernel")


class Finder(MetaPathFinder, Loader):
    """Finds them and whatever is in them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> MagicMock:
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """In each process before the first import of OpenRLHF; installed packages are found first."""
    sys.meta_path.append(Finder())
