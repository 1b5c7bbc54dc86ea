"""The kinds of devices: CUDA's GPUs, and those that other packages bring.

A package publishes its subclass of `Device` under the entry point group `dataplane.devices`. The
entry point's name is the kind, which a peer names to its clients with each pool. Tests bring a kind
that is host memory.
"""

from __future__ import annotations

from dataplane import plugins
from dataplane.errors import DeviceMissing
from dataplane.gpu.device import Device, PoolHandle

GROUP = "dataplane.devices"
CUDA = "cuda"


def names() -> list[str]:
    """Return the kinds of devices that installed packages support."""
    return [CUDA, *sorted({entry.name for entry in plugins.installed(GROUP)} - {CUDA})]


def load(kind: str) -> type[Device]:
    """Return the class of a kind. Raise DeviceMissing if no installed package supports it, or if
    its package cannot be imported."""
    if kind == CUDA:
        from dataplane.gpu.cuda import CudaDevice

        return CudaDevice
    for entry in plugins.installed(GROUP).select(name=kind):
        return plugins.load(entry, Device, f"the device plug-in for {kind!r}", DeviceMissing)
    raise DeviceMissing(
        f"no installed package supports devices of kind {kind!r} (supported: "
        f"{', '.join(names())}): install the same device packages as on the peer"
    )


def device_of(handle: PoolHandle) -> Device:
    """Return the device of a pool. Raise DeviceMissing if this process does not have it."""
    return load(handle.kind).of(handle.device)
