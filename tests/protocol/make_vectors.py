"""Makes the bytes of protocol/vectors and the examples of the documents.

Run as `python -m tests.protocol.make_vectors`. Takes the named `fields` of every vector, the order
and defaults of fields from the tables in protocol/*.md, and the `msgpack` package. Nothing of
`dataplane` is imported: where the code differs, a test says so. `--check` only compares.

JSON has no bytes and only str keys: {"bin": hex}, {"map": [[key, value], …]}, and for objects
{"tuple": […]}, {"int": digits}, {"scalar": [dtype, hex]}, {"array": [dtype, shape, hex]},
{"tensor": [dtype, shape, hex]}. A body is named by "@".
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgpack

from tests.protocol.documents import (
    DOCUMENTS,
    PROTOCOL,
    REQUIRED,
    VECTORS,
    Structure,
    structures,
)

FRAMED = ("local", "bulk", "worker")
"""Channels with a length before each message; ZeroMQ has its own."""
Vector = dict[str, Any]


def load(name: str) -> list[Vector]:
    vectors: list[Vector] = json.loads((VECTORS / f"{name}.json").read_text())
    return vectors


def python_of(value: Any) -> Any:
    """What a JSON value of a vector stands for, down to bytes and ext values."""
    if isinstance(value, list):
        return [python_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"bin": digits}:
            return bytes.fromhex(digits)
        case {"ext": [code, digits]}:
            return msgpack.ExtType(code, bytes.fromhex(digits))
        case {"map": pairs}:
            return {_hashable(python_of(key)): python_of(item) for key, item in pairs}
    return {key: python_of(item) for key, item in value.items()}


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def pack(value: Any) -> bytes:
    """The shortest MessagePack form, floats in 64 bits, by the independent encoder."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def framed(channel: str, body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body if channel in FRAMED else body


class Layout:
    """Puts named fields into the order of a channel's tables."""

    def __init__(self, channel: str) -> None:
        self._known = structures("local") | structures("bulk") if channel == "worker" else {}
        self._known |= structures("local") if channel in ("peers", "journal") else {}
        self._known |= structures("local") if channel == "bulk" else {}
        self._known |= structures("journal") if channel == "peers" else {}
        self._known |= structures(channel)

    def array(self, name: str, fields: dict[str, Any]) -> list[Any]:
        """The array of a structure; every field is written, those left out as their default."""
        structure = self._known[name]
        unknown = fields.keys() - {field.name for field in structure.fields} - {"@"}
        assert not unknown, f"{name} has no {unknown}"
        array = [] if structure.tag is None else [structure.tag]
        for field in structure.fields:
            value = fields.get(field.name, field.default)
            assert value is not REQUIRED, f"{name} needs {field.name}"
            array.append(self._laid_out(field.kind, value))
        return array

    def _laid_out(self, kind: str, value: Any) -> Any:
        if value is None or isinstance(value, bytes):
            return value
        if kind == "message":
            return self.array(value["@"], value)
        if kind == "array of log record":
            return [self.array(item["@"], item) for item in value]
        inner = re.fullmatch(r"(array of )?([A-Z]\w+)( or nil)?", kind)
        if inner and inner[2] in self._known:
            if inner[1]:
                return [self.array(inner[2], item) for item in value]
            return self.array(inner[2], value)
        return python_of(value)


def tail(structure: Structure) -> int:
    """How many trailing fields a sender may leave out."""
    count = 0
    for field in reversed(structure.fields):
        if field.default is REQUIRED:
            break
        count += 1
    return count


def lowered(value: Any, arrays: list[bytes]) -> Any:
    """An object value in MessagePack's terms: tuples, large ints, scalars and arrays are ext. The
    bytes of arrays are added to `arrays`."""
    if isinstance(value, list):
        return [lowered(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"bin": digits}:
            return bytes.fromhex(digits)
        case {"tuple": items}:
            return msgpack.ExtType(2, pack(lowered(items, arrays)))
        case {"int": digits}:
            number = int(digits)
            size = number.bit_length() // 8 + 1
            return msgpack.ExtType(3, number.to_bytes(size, "little", signed=True))
        case {"scalar": [dtype, digits]}:
            return msgpack.ExtType(
                4, bytes([len(dtype)]) + dtype.encode("ascii") + bytes.fromhex(digits)
            )
        case {"array": [dtype, shape, digits]}:
            return msgpack.ExtType(1, pack([dtype, shape, _offset(arrays, digits)]))
        case {"tensor": [dtype, shape, digits]}:
            return msgpack.ExtType(5, pack([dtype, shape, _offset(arrays, digits)]))
        case {"map": pairs}:
            return {lowered(key, arrays): lowered(item, arrays) for key, item in pairs}
    raise AssertionError(f"no object: {value}")


def _offset(arrays: list[bytes], digits: str) -> int:
    """Where one more array starts."""
    offset = len(padded(arrays, 16))
    offset += -offset % 16
    arrays.append(bytes.fromhex(digits))
    return offset


def padded(parts: list[bytes], alignment: int) -> bytes:
    """Parts one behind the other, each at a multiple of `alignment`."""
    whole = b""
    for part in parts:
        whole += bytes(-len(whole) % alignment) + part
    return whole


def row_of(value: Any) -> bytes:
    """The bytes of an object."""
    arrays: list[bytes] = []
    head = pack(lowered(value, arrays))
    return padded([len(head).to_bytes(4, "little") + head, *arrays], 16)


def shown(value: Any) -> Any:
    """A literal as JSON: bytes and ext values as hexadecimal, maps with keys of any type."""
    if isinstance(value, msgpack.ExtType):
        return {"ext": [value.code, value.data.hex()]}
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, dict):
        return {"map": [[shown(key), shown(item)] for key, item in value.items()]}
    return [shown(item) for item in value] if isinstance(value, list | tuple) else value


def made(channel: str, vector: Vector, layout: Layout) -> Vector:
    """The vector with its array and bytes made anew."""
    array = layout.array(vector["structure"], vector["fields"])
    return vector | {"array": shown(array), "hex": framed(channel, pack(array)).hex()}


def made_object(vector: Vector) -> Vector:
    literal = lowered(vector["value"], [])
    return vector | {"literal": shown(literal), "hex": row_of(vector["value"]).hex()}


def made_chunk(vector: Vector) -> Vector:
    """columns: as in ColumnSpec. rows: by column; of arrays a shape and the items of each, of
    scalars and numbers the item."""
    layout = Layout("local")
    specs = [layout.array("ColumnSpec", column) for column in vector["columns"]]
    lengths, values = list[int](), list[bytes]()
    for (kind, _, shape, _), rows in zip(specs, vector["rows"], strict=True):
        if kind in ("scalar", "number"):
            values.append(bytes.fromhex("".join(rows)))
            continue
        if kind == "array":
            opened = [at for at, length in enumerate(shape) if length == -1]
            lengths += [of[at] for of, _ in rows for at in opened]
            values.append(b"".join([bytes.fromhex(items) for _, items in rows]))
            continue
        cells = [
            row_of(row) if kind == "object" else row.encode() if kind == "text" else python_of(row)
            for row in rows
        ]
        lengths += map(len, cells)
        parts = [cell + bytes(-len(cell) % 16) for cell in cells] if kind == "object" else cells
        values.append(b"".join(parts))
    head = b"".join([length.to_bytes(4, "little") for length in lengths])
    described = {"version": 1, "columns": vector["columns"]}
    told = {"layout": pack(layout.array("Layout", described)).hex()}
    if vector.get("on_device"):
        return vector | told | {"lengths": head.hex(), "hex": padded(values, 64).hex()}
    return vector | told | {"hex": padded([head, *values], 64).hex()}


def message_of(vector: Vector) -> str:
    """The message that a vector is about: its body, where it is an envelope."""
    name: str = vector["fields"].get("body", {}).get("@", vector["structure"])
    return name


def notation(value: Any) -> str:
    """A literal as the documents show it."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{notation(k)}: {notation(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(notation, value)) + "]"
    return "nil" if value is None else json.dumps(value, ensure_ascii=False)


def example(vector: Vector) -> str:
    digits = vector["hex"]
    lines = [digits[i : i + 64] for i in range(0, len(digits), 64)]
    spaced = "\n".join(" ".join(line[i : i + 2] for i in range(0, len(line), 2)) for line in lines)
    return f"```text\n{notation(python_of(vector['array']))}\n\n{spaced}\n```"


def with_examples(text: str, vectors: list[Vector]) -> str:
    """The document with the first vector of each message below its table."""
    first: dict[str, Vector] = {}
    for vector in vectors:
        first.setdefault(message_of(vector), vector)
    parts = re.split(r"^(### .+\n)", text, flags=re.M)
    for index in range(1, len(parts), 2):
        shown = first.get(parts[index].removeprefix("### ").strip())
        if shown is not None:
            block = example(shown)
            parts[index + 1] = re.sub(
                r"```text\n.*?```", lambda _, block=block: block, parts[index + 1], flags=re.S
            )
    return "".join(parts)


def as_json(vectors: list[Vector]) -> str:
    """One line per entry of a vector, so that a change of the wire is a short diff."""
    blocks = []
    for vector in vectors:
        entries = (
            f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in vector.items()
        )
        blocks.append("{\n" + ",\n".join(entries) + "\n}")
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def everything() -> dict[Path, str]:
    """The files as they should be."""
    files = {}
    for channel, document in DOCUMENTS.items():
        layout = Layout(channel)
        vectors = [made(channel, vector, layout) for vector in load(channel)]
        files[VECTORS / f"{channel}.json"] = as_json(vectors)
        text = (PROTOCOL / document).read_text()
        files[PROTOCOL / document] = with_examples(text, vectors)
    files[VECTORS / "objects.json"] = as_json([made_object(v) for v in load("objects")])
    files[VECTORS / "chunks.json"] = as_json([made_chunk(v) for v in load("chunks")])
    return files


def main(argv: list[str]) -> int:
    changed = [path for path, text in everything().items() if path.read_text() != text]
    for path in changed:
        print(f"{'differs' if '--check' in argv else 'written'}: {path.relative_to(PROTOCOL)}")
    if "--check" in argv:
        return bool(changed)
    for path, text in everything().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
