"""Torch devices that a caller names: checks that they exist, and copies to GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidCall, counted
from dataplane.wire.arrays import kind_of, shown

T = TypeVar("T")


def check_device(device: str) -> None:
    """Raise InvalidCall for a device that torch does not know, or a GPU that it does not find."""
    import torch

    try:
        if not isinstance(device, (str, int, torch.device)):
            raise TypeError(f"got {kind_of(device)}")  # torch itself crashes on some lists
        asked = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise InvalidCall(
            f"invalid device={shown(device):.40}: expected a torch device, for example 'cpu' "
            "or 'cuda:0'"
        ) from exc
    if asked.type == "cuda" and (asked.index or 0) >= (gpus := torch.cuda.device_count()):
        raise InvalidCall(
            f"device={device!r:.40}: torch sees {counted(gpus, 'CUDA GPU')} from this process: "
            "check CUDA_VISIBLE_DEVICES and the installed torch, or pass another device"
        )


def place_named(device: str) -> str:
    """Return the device with the number of its GPU: each thread has its own `cuda`."""
    torch: Any = sys.modules.get("torch")
    if str(device) != "cuda" or torch is None or not torch.cuda.is_available():
        return device
    return f"cuda:{torch.cuda.current_device()}"


def settled(device: str, work: Callable[[], T]) -> T:
    """Do the work, and wait until the GPU has finished it. A caller that continues in another
    thread needs this, because that thread uses another stream of torch."""
    made = work()
    if str(device).startswith("cuda"):
        sys.modules["torch"].cuda.current_stream(device).synchronize()
    return made


def filled_on_gpu(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    form: Any,
    device: str,
    fill: Callable[[npt.NDArray[Any]], None],
) -> Any | None:
    """Return a tensor of data written into an array, copied from page-locked memory without
    waiting. form: torch's dtype. None if the device is not a GPU."""
    torch: Any = sys.modules["torch"]
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    host = torch.empty(shape, dtype=form, pin_memory=True)
    memory = host.reshape(-1).view(torch.uint8).numpy()
    fill(memory.view(dtype).reshape(shape))
    return host.to(device, non_blocking=True)
