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
    """The kinds that are installed."""
    return [CUDA, *sorted({entry.name for entry in plugins.installed(GROUP)} - {CUDA})]


def load(kind: str) -> type[Device]:
    """Return the class of a kind. DeviceMissing if no installed package has it, or its package
    cannot be imported."""
    if kind == CUDA:
        from dataplane.gpu.cuda import CudaDevice

        return CudaDevice
    for entry in plugins.installed(GROUP).select(name=kind):
        return plugins.load(entry, Device, f"the device plug-in for {kind!r}", DeviceMissing)
    raise DeviceMissing(
        f"no installed package supports devices of kind {kind!r} (installed: "
        f"{', '.join(names())}): install the same device packages as on the peer"
    )


def device_of(handle: PoolHandle) -> Device:
    """The device of a pool as this process has it. DeviceMissing where it does not."""
    return load(handle.kind).of(handle.device)
