"""Values whose bytes do not fit their layout: every way to read one names the row, and the rows
beside it are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane import Plane, ValueCorrupt, aio, cli
from dataplane.client._sync.calls import Call, send
from dataplane.client.arguments import Deadline
from dataplane.metadata.tables.keys import hash_names
from dataplane.wire import layouts
from dataplane.wire.layouts import OPEN, ColumnSpec
from dataplane.wire.messages import Put
from dataplane.wire.packed import EXTENT, column
from dataplane.wire.tables import INLINE, Chunk, Piece, Rows, Values
from tests.end_to_end.conftest import Cluster

SOUND = b"\1\0\0\0\xc0"
"""An object: None."""


def objects(*rows: bytes) -> bytes:
    """The bytes of a chunk with a column of objects."""
    lengths = b"".join([len(row).to_bytes(4, "little") for row in rows])
    values = b"".join([row + bytes(-len(row) % 16) for row in rows])
    return lengths + bytes(-len(lengths) % 64) + values


def head(raw: bytes) -> bytes:
    """An object with this head, and with 8 bytes of arrays."""
    start = len(raw).to_bytes(4, "little") + raw
    return start + bytes(-len(start) % 16) + bytes(8)


OBJECT = ColumnSpec("object")
LEAF = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["int64", [2], 0])))
CORRUPT: dict[str, tuple[bytes, bytes, str]] = {
    "a layout that claims more": (
        layouts.encode((ColumnSpec("array", "int64", (4,)),)),
        bytes(16),
        "take 64 bytes, but the chunk has 16",
    ),
    "lengths that do not add up": (
        layouts.encode((ColumnSpec("bytes"),)),
        b"\1\0\0\0\7\0\0\0" + bytes(56) + bytes(2),
        "take 72 bytes, but the chunk has 66",
    ),
    "a dtype that is unknown": (
        layouts.encode((ColumnSpec("array", "int65", ()),)),
        bytes(16),
        "dtype 'int65' is not part of this protocol",
    ),
    "no layout": (b"\xc1", bytes(16), "its layout cannot be decoded"),
    "text that is no UTF-8": (
        layouts.encode((ColumnSpec("text"),)),
        b"\1\0\0\0\1\0\0\0" + bytes(56) + b"a\xff",
        "expected UTF-8 text",
    ),
    "an array outside its object": (
        layouts.encode((OBJECT,)),
        objects(SOUND, head(LEAF)),
        "does not fit in its object's 8 bytes",
    ),
    "no MessagePack": (layouts.encode((OBJECT,)), objects(SOUND, head(b"\xc1")), "decoded"),
    "an object without its head": (
        layouts.encode((OBJECT,)),
        objects(SOUND, b"\xff\0\0\0"),
        "the object is truncated",
    ),
}
SECOND = list(CORRUPT)[-4:]
"""In these cases the first of the two rows is sound."""


def store(plane: Plane, name: str, layout: bytes, inline: bytes) -> None:
    """Put a chunk with the rows "k" and "l", as another client might write it."""
    generation: int = plane.partition(name).stats()["generation"]
    chunk, piece = Chunk(0, 0, 2, len(inline), 0, inline), Piece(0, (0,), 0, b"\3")
    values = Values(["x"], [INLINE], [layout], [chunk], [piece])
    keys = hash_names(["k", "l"])
    body = Put(name, generation, Rows(keys, ["k", "l"]), values)
    send(plane._session, Call(body, Deadline(20.0)))


def doors(rows: Any) -> dict[str, Callable[[], object]]:
    """The ways to read field x of a batch or of rows."""
    return {
        "iterating": lambda: list(rows["x"]),
        "an index": lambda: [rows["x"][at] for at in range(len(rows))],
        "get": lambda: rows.get("x"),
        "numpy": lambda: rows.numpy("x"),
        "torch": lambda: rows.torch("x"),
        "padded": lambda: rows.torch("x", layout="padded"),
        "tensordict": lambda: rows.tensordict(),
        "arrow": lambda: rows.arrow(),
    }


def names_the_row(read: Callable[[], object], key: str, why: str, writer: str = "") -> None:
    with pytest.raises(ValueCorrupt, match=why) as refused:
        read()
    assert refused.value.details == {"field": "x", "key": key, "writer": writer}
    assert f"the value of row {key!r}" in refused.value.message
    assert writer in refused.value.message and "Put the row again" in refused.value.message


@pytest.mark.parametrize("how", list(CORRUPT))
def test_every_way_to_read_a_corrupt_value_names_its_row(
    plane: Plane, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, inline, why = CORRUPT[how]
    key = "l" if how in SECOND else "k"
    part = plane.partition("p", {"s": ["x"]}, free="drop")
    store(plane, "p", layout, inline)
    for rows in (part.claim("s", rows=2, timeout=20), part.get(keys=["k", "l"])):
        for read in doors(rows).values():
            names_the_row(read, key, why)
        assert rows.keys == ["k", "l"]
    if how in SECOND:
        assert part.get(keys=["k"])["x"][0] in (None, "a")
    plane.checkpoint(tmp_path / "saved")
    assert cli.main(["checkpoint", "export", f"{tmp_path}/saved", f"{tmp_path}/out"]) == 2
    said = capsys.readouterr().err
    assert f"field 'x': the value of row {key!r} is corrupt" in said
    assert not (tmp_path / "out").exists()
    part.drop()


def test_a_shape_that_numpy_lacks_is_a_corrupt_value_of_its_row(plane: Plane) -> None:
    """Torch has it."""
    part = plane.partition("p", free="drop")
    layout = layouts.encode((ColumnSpec("array", "int64", (OPEN, OPEN, 0)),))
    store(plane, "p", layout, b"\0\0\0\x80" * 4 + bytes(48))
    rows = part.get(keys=["k", "l"])
    for how in ("iterating", "an index", "get", "numpy", "arrow"):
        names_the_row(doors(rows)[how], "k", "2147483648, 2147483648, 0")
    part.drop()


@pytest.mark.parametrize("how", list(CORRUPT))
def test_a_corrupt_value_is_named_in_asyncio_too(alone: Cluster, how: str) -> None:
    layout, inline, why = CORRUPT[how]
    key = "l" if how in SECOND else "k"
    with alone.connect("a") as plane:
        plane.partition("p", {"s": ["x"]}, free="drop")
        store(plane, "p", layout, inline)

    async def main() -> None:
        async with aio.connect("a", run="test") as plane:
            part = await plane.partition("p")
            for rows in (await part.claim("s", rows=2, timeout=20), await part.get()):
                names_the_row(lambda rows=rows: list(rows["x"]), key, why)  # type: ignore[misc]
                for convert in (rows.torch, rows.numpy):
                    with pytest.raises(ValueCorrupt, match=why) as refused:
                        await convert("x")
                    assert refused.value.details["key"] == key
                with pytest.raises(ValueCorrupt, match=why):
                    await rows.arrow()
            await part.drop()

    asyncio.run(main())


def test_a_value_of_another_host_is_named_with_the_peer_that_stores_it(pair: Cluster) -> None:
    with pair.connect("a") as here, pair.connect("b") as there:
        part, far = here.partition("p", {"s": ["x", "y"]}), there.partition("p")
        keys = ["k", "l"]
        part.put({"x": [{"n": np.arange(5_000)}] * 2, "y": [b"y" * 9_000] * 2}, key=keys)
        table = part.get(keys=keys)._table
        for chunk, (offset, nbytes) in zip(
            table.values.chunks, column(table.places, EXTENT).tolist(), strict=True
        ):
            if layouts.decode(table.values.layouts[chunk.layout])[0] == OBJECT:
                memory = here._session.writes.view(offset, nbytes)
                first = int(np.asarray(memory[:4]).view("<u4")[0])
                second = 64 + first + -first % 16
                memory[second : second + 16] = 0xC1
        del memory
        batch = far.claim("s", rows=2, timeout=20)
        assert batch["y"][1] == b"y" * 9_000
        names_the_row(lambda: list(batch["x"]), "l", "object", pair.addresses["a"])
        assert batch["x"][0]["n"][-1] == 4_999
        batch.release()
