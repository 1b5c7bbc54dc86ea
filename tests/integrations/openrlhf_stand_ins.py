"""Empty modules in place of what OpenRLHF imports and only a GPU has. Nothing calls into them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

MISSING = ("vllm", "deepspeed", "flash_attn", "ring_flash_attn", "bitsandbytes", "liger_kernel")


class Finder:
    """Finds them and whatever is in them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, Finder) if name.split(".")[0] in MISSING else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> MagicMock:
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    @staticmethod
    def exec_module(module: MagicMock) -> None:
        pass


def install() -> None:
    """In each process before the first import of OpenRLHF; installed packages are found first."""
    sys.meta_path.append(Finder)  # type: ignore[arg-type]
