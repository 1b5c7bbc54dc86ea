"""What peers say to each other to try the ways between them: known bytes to read.

The bytes themselves are read as all others are, by bulk transfer.
"""

from __future__ import annotations

from dataplane.wire.messages import Body


class Sample(Body, tag=160):
    """Asks for bytes to try transports on. The owner keeps them for 30 s, or until it is told that
    the reader is done with them (answered by `Done`). device: bytes on a device, which its device
    workers serve; an owner without any lends none."""

    done: bool = False
    device: bool = False


class Sampled(Body, tag=161):
    """Bytes `(seed + 167 i) xor (i >> 8) xor (i >> 16)`, modulo 256, at index i of one range.

    nbytes 0: there is no room for any. transport: the engine that the owner's bulk workers run;
    missing: why not the one it was told to. wall_ns: the owner's clock, since 1970.
    """

    range: int
    generation: int
    nbytes: int
    seed: int
    transport: str
    missing: str
    requested: str
    version: str
    arena_bytes: int
    wall_ns: int
