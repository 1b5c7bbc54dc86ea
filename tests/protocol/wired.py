"""The code's side of the protocol tests: structs by name, and their codecs by channel."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.transport import bulk_frames
from dataplane.wire import (
    checkpoint,
    events,
    frames,
    journal,
    layouts,
    messages,
    objects,
    peering,
    tables,
)
from tests.protocol.make_vectors import python_of

SHARED = {
    name: getattr(tables, name)
    for name in (
        "Definition",
        "Owner",
        "Change",
        "PoolHandle",
        "RosterTable",
        "Takeover",
        "Chunk",
        "Piece",
        "Values",
        "Rows",
        "Table",
        "Shape",
        "PlanRows",
    )
} | {"Layout": layouts.Layout, "ColumnSpec": layouts.ColumnSpec}


def _defined_in(module: types.ModuleType) -> dict[str, type[msgspec.Struct]]:
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and name not in ("Body", "Frame")
    }


LOCAL = _defined_in(messages) | _defined_in(checkpoint) | _defined_in(events)
PEERS = _defined_in(peering)
_BULK = _defined_in(bulk_frames)


def members(union: Any) -> list[type[msgspec.Struct]]:
    return list(typing.get_args(union))


def bodies(envelope: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return members(typing.get_type_hints(envelope)["body"])


_WORKER = {kind.__name__ for kind in members(bulk_frames.ToWorker)}
_WORKER |= {kind.__name__ for kind in members(bulk_frames.FromWorker)}

STRUCTS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "local": SHARED | LOCAL,
    "peers": PEERS,
    "journal": _defined_in(journal),
    "bulk": {name: kind for name, kind in _BULK.items() if name not in _WORKER},
    "worker": {name: kind for name, kind in _BULK.items() if name in _WORKER},
}
"""What each document must describe."""

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "local request": frames.decode_request,
    "local reply": frames.decode_reply,
    "peer request": peering.decode_request,
    "peer reply": peering.decode_reply,
    "operation": journal.decode,
    "bulk join": bulk_frames.decode_join,
    "bulk request": bulk_frames.decode_to_owner,
    "bulk answer": bulk_frames.decode_from_owner,
    "to worker": bulk_frames.decode_to_worker,
    "from worker": bulk_frames.decode_from_worker,
    "object": objects.decode,
}


def decoder_of(channel: str, structure: str) -> Callable[[bytes], Any]:
    """How whoever receives this structure reads its body."""
    if channel in ("local", "peers"):
        what = "request" if structure.endswith("Request") else "reply"
        return DECODERS[f"{channel.removesuffix('s')} {what}"]
    if channel == "journal":
        return DECODERS["operation"]
    kind = STRUCTS[channel][structure]
    if kind is bulk_frames.Join:
        return DECODERS["bulk join"]
    for name, union in (
        ("bulk request", bulk_frames.ToOwner),
        ("bulk answer", bulk_frames.FromOwner),
        ("to worker", bulk_frames.ToWorker),
        ("from worker", bulk_frames.FromWorker),
    ):
        if kind in members(union):
            return DECODERS[name]
    raise AssertionError(f"nobody receives {structure}")


def encode(channel: str, struct: Any) -> bytes:
    """What travels for this struct, length included where the channel has one."""
    if channel == "peers":
        return peering.encode(struct)
    if channel == "journal":
        return journal.encode(struct)
    return bytes(frames.encode(struct) if channel == "local" else bulk_frames.encode(struct))


def built(kind: Any, value: Any) -> Any:
    """A value of annotation `kind` from the named fields of a vector, without a decoder."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{k: built(hints[k], item) for k, item in value.items() if k != "@"})
    if origin in (typing.Union, types.UnionType):
        structs = [a for a in args if isinstance(a, type) and issubclass(a, msgspec.Struct)]
        if isinstance(value, dict) and "@" in value:
            return built(next(a for a in structs if a.__name__ == value["@"]), value)
        if structs and value is not None:
            return built(structs[0], value)
    elif origin is tuple:
        return tuple(map(python_of, value))
    elif origin is list:
        return [built(args[0], item) for item in value]
    return python_of(value)
