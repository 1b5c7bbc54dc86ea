"""Which transports exist: built-in ones, and those of other packages.

A package names its subclass of `Transport` in the entry point group `dataplane.transports`.
Loading one imports its engine, so the peer only looks it up, and a bulk worker loads it.
"""

from __future__ import annotations

from importlib.util import find_spec

from dataplane import plugins
from dataplane.errors import TransportMissing
from dataplane.transport.seam import Transport

GROUP = "dataplane.transports"
TCP = "tcp"
CUDA_IPC, NCCL = "cuda_ipc", "nccl"
POOLS_ONLY = (CUDA_IPC, NCCL)
"""Transports between pools only. If one of them is required, host memory uses TCP."""

OWN: dict[str, tuple[tuple[str, ...], str]] = {
    "nixl": (
        ("nixl_cu13", "nixl_cu12", "nixl"),
        "pip install --no-deps 'nixl-cu13>=1.5,<2' (without --no-deps, pip also installs torch)",
    ),
}
"""Name: the modules of which one must be installed, and how to install it."""
CLASSES = {
    TCP: "dataplane.transport.tcp:TcpTransport",
    "nixl": "dataplane.transport.engines.nixl:NixlTransport",
    CUDA_IPC: "dataplane.transport.engines.cuda_ipc:CudaIpcTransport",
    NCCL: "dataplane.transport.engines.nccl:NcclTransport",
}


def names() -> list[str]:
    """Transports for host memory, besides TCP, in the order in which `auto` tries them: built-in
    ones first."""
    theirs = {entry.name for entry in plugins.installed(GROUP)}
    return [*OWN, *sorted(theirs - OWN.keys() - {TCP, *POOLS_ONLY})]


def missing(name: str) -> str:
    """Return why a transport cannot be loaded, as far as a lookup shows; "" if it can."""
    if name in OWN:
        modules, install = OWN[name]
        if any(find_spec(module) is not None for module in modules):
            return ""
        return f"{' or '.join(modules)} is not installed: {install}"
    if name in (TCP, *POOLS_ONLY) or any(entry.name == name for entry in plugins.installed(GROUP)):
        return ""
    if name == "ucx":
        return "UCX runs through NIXL: choose nixl instead"
    known = ", ".join([TCP, *names(), *POOLS_ONLY])
    return f"no installed package provides a transport {name!r} (available: {known})"


def load(name: str) -> type[Transport]:
    """Return the class of a transport. Raise TransportMissing, with the reason, if there is
    none."""
    if why := missing(name):
        raise TransportMissing(f"transport {name} is not available: {why}", transport=name)
    if name in CLASSES:
        entry = plugins.entry(GROUP, name, CLASSES[name])
    else:
        (entry, *_) = plugins.installed(GROUP).select(name=name)
    return plugins.load(entry, Transport, f"transport {name!r}", TransportMissing, transport=name)
