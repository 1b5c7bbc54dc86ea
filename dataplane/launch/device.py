"""Device memory of a peer: `--device-arena`, and the devices that it names.

`2GiB`: so much of each GPU that the peer sees. `twin:64MiB`: of the twin in host memory, for tests
and trials on machines without a GPU, `twin:2x64MiB` of two of them, `twin@1:64MiB` of the second
one, as if another peer had the first; nothing else ever chooses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataplane.errors import DeviceMissing, InvalidConfig
from dataplane.launch.config import parse_size

if TYPE_CHECKING:
    from dataplane.memory.device import Device

MIN_BYTES = 1 << 20
MAX_DEVICES = 16
_TWIN = re.compile(r"twin(?:@([0-9]))?")
_SEVERAL = re.compile(r"([1-9])x(.+)")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """nbytes: of each device. twins: how many in host memory, instead of the GPUs, from `first`."""

    nbytes: int
    twins: int = 0
    first: int = 0


def parse_device_arena(text: str) -> DeviceMemory:
    """`2GiB`, `twin:64MiB`, `twin:2x64MiB`. InvalidConfig for anything else."""
    head, colon, tail = text.partition(":")
    twin = _TWIN.fullmatch(head)
    if colon and twin is None:
        raise InvalidConfig(
            f"{text!r} is no device arena: write a size such as 2GiB, which each GPU gives, or "
            "twin:64MiB for a stand-in in host memory (--device-arena or DATAPLANE_DEVICE_ARENA)"
        )
    twins, first = 0, 0
    if twin is not None and colon:
        first = int(twin[1] or 0)
        several = _SEVERAL.fullmatch(tail)
        twins, tail = (int(several[1]), several[2]) if several else (1, tail)
    memory = DeviceMemory(parse_size(tail if colon else text), twins, first)
    if memory.nbytes < MIN_BYTES:
        raise InvalidConfig(
            f"a device arena of {memory.nbytes} bytes is too small: give at least "
            f"{MIN_BYTES >> 20}MiB (--device-arena or DATAPLANE_DEVICE_ARENA)",
            nbytes=memory.nbytes,
            minimum=MIN_BYTES,
        )
    return memory


def find_device_arena(
    given: str | None = None, environ: Mapping[str, str] = os.environ
) -> DeviceMemory | None:
    """What is given, else DATAPLANE_DEVICE_ARENA; None where neither is there: no such memory."""
    text = given or environ.get("DATAPLANE_DEVICE_ARENA")
    return parse_device_arena(text) if text else None


def devices_of(memory: DeviceMemory) -> list[Device]:
    """The devices that give the memory. DeviceMissing where there is none, or no library for it."""
    if memory.twins:
        from dataplane.memory.device_twin import TwinDevice

        numbers = range(memory.first, memory.first + memory.twins)
        return [TwinDevice(f"twin:{number}") for number in numbers]
    from dataplane.memory.device_cuda import CudaDevice

    count = CudaDevice.count()
    if not count:
        raise DeviceMissing(
            "--device-arena (or DATAPLANE_DEVICE_ARENA) asks for GPU memory, and this process sees "
            "no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or leave it out"
        )
    return [CudaDevice(number) for number in range(min(count, MAX_DEVICES))]
