"""The GPU of the bench: its arrays, and its bare copies as ceilings. torch is imported here."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Gpu(Protocol):
    """`kind` as `dataplane peer --device-arena` names the memory: "" for GPUs, "twin:"."""

    kind: str

    def array(self, nbytes: int) -> Any:
        """Bytes on it, different ones each time."""
        ...

    def tensor(self, batch: Any, field: str) -> Any:
        """The batch's field as a private tensor on it, there when this returns."""
        ...

    def device_copy_s(self, nbytes: int) -> float:
        """One copy from memory of it to memory of it."""
        ...

    def pinned_copy_s(self, nbytes: int) -> float:
        """One copy to it from pinned host memory."""
        ...


class Cuda:
    """The first one that torch sees."""

    kind = ""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._buffers: dict[tuple[str, int], tuple[Any, Any]] = {}

    def array(self, nbytes: int) -> Any:
        made = self._torch.randint(0, 256, (nbytes,), dtype=self._torch.uint8, device="cuda")
        self._torch.cuda.synchronize()
        return made

    def tensor(self, batch: Any, field: str) -> Any:
        made = batch.torch(field, device="cuda")
        self._torch.cuda.synchronize()
        return made

    def device_copy_s(self, nbytes: int) -> float:
        return self._copy_s("cuda", nbytes)

    def pinned_copy_s(self, nbytes: int) -> float:
        return self._copy_s("cpu", nbytes)

    def _copy_s(self, where: str, nbytes: int) -> float:
        if (where, nbytes) not in self._buffers:
            torch = self._torch
            source = torch.ones(nbytes, dtype=torch.uint8, device=where, pin_memory=where == "cpu")
            target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            self._buffers[where, nbytes] = source, target
        source, target = self._buffers[where, nbytes]
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self._torch.cuda.synchronize()
        return time.perf_counter() - began


def missing() -> str:
    """What stands in the way of measuring on a GPU, as far as looking tells; "" for nothing."""
    from dataplane.errors import DeviceMissing
    from dataplane.gpu.cuda import CudaDevice

    try:
        if not CudaDevice.count():
            return "no GPU is visible here"
        import torch
    except (DeviceMissing, ImportError) as exc:
        return str(exc)
    return "" if torch.cuda.is_available() else "torch has no CUDA"
