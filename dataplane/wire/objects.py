"""Object values: a row of an object column is one self-contained byte string.

    size of the head (u4) | head: a MessagePack value | pad to 16 | array | pad to 16 | array …

An array in the head is an ext value with its dtype, its shape and the offset of its bytes, counted
from the first multiple of 16 after the head.

These types are read back unchanged: None, bool, int of any size, float, str, bytes, list, tuple,
dict (any scalar or tuple keys, in order), NumPy scalars and arrays, and torch tensors, including
nested jagged ones. Other values are read back as a similar type: bytearray and memoryview as bytes,
arrays of objects as lists, arrays of other libraries as NumPy arrays, and dataclasses, pydantic
models and TensorDicts as dicts. Subclasses and all other classes are refused. Nothing is pickled,
and an unknown ext code is an error.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache, partial
from struct import Struct
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from xxhash import xxh3_128_digest

from dataplane.errors import (
    DataplaneError,
    InvalidValue,
    LimitExceeded,
    ValueCorrupt,
)
from dataplane.wire.arrays import (
    Array,
    as_array,
    dtype_name,
    dtype_of,
    is_jagged,
    is_torch,
    jagged_parts,
    kind_of,
    raw,
    remedy,
    shown,
    tensor_over,
    text_of,
)
from dataplane.wire.layouts import OBJECT_ALIGNMENT_BYTES
from dataplane.wire.limits import MAX_HEAD_BYTES, MAX_LEAVES_PER_ROW, MAX_NESTING, MAX_RANK

EXT_ARRAY = 1
"""A MessagePack array: the fields of `Leaf`."""
EXT_TUPLE = 2
"""One MessagePack array: the items of a tuple."""
EXT_INT = 3
"""An int beyond 64 bits: two's complement, little-endian."""
EXT_SCALAR = 4
"""A numpy scalar: length of the dtype's name (one byte), the name, the item's bytes."""
EXT_TENSOR = 5
"""Like EXT_ARRAY, for an array that was put as a torch tensor."""
EXT_JAGGED = 6
"""A nested jagged tensor of torch. A MessagePack array: the fields of `Jagged`."""
ONCE_BYTES = 64 << 10
"""A row stores equal arrays of at least this size once."""
Buffer = Any
"""Bytes, or a contiguous array whose dtype the buffer protocol supports."""

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_MAY_HOLD_TIME = frozenset((datetime, list, tuple, dict))
_TIMESTAMP = re.compile(rb"\xd6\xff|\xd7\xff|\xc7\x0c\xff")
"""The first bytes of an ext value of code -1, in its three sizes."""
_encoder = msgspec.msgpack.Encoder()


class Leaf(msgspec.Struct, array_like=True, frozen=True):
    """An array of an object row. offset: in bytes, from the first multiple of 16 after the head."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Jagged(msgspec.Struct, array_like=True, frozen=True):
    """A nested tensor: its values, the int64 offsets of its rows and of the end, and the ragged
    axis of a row."""

    values: Leaf
    offsets: Leaf
    axis: int


_leaf_decoder = msgspec.msgpack.Decoder(Leaf)
_jagged_decoder = msgspec.msgpack.Decoder(Jagged)
_SIZE = Struct("<I")
_SIZE_BYTES = _SIZE.size
_PADDING = [bytes(length) for length in range(OBJECT_ALIGNMENT_BYTES)]


def encode(value: object, path: str = "value") -> list[Buffer]:
    """Return the bytes of a row, as buffers in order, without copying arrays.

    `path` names the value in errors (`prompt[3]`). Raises InvalidValue for a value that has no wire
    form, and LimitExceeded for too deep nesting, too many arrays or a head of 4 GiB.
    """
    try:
        if type(value) in _PLAIN:
            return [_row(_encoder.encode(value), path)]
        walk = _Walk(path)
        return _buffers(_encoder.encode(walk.lower(value)), walk.leaves, path)
    except (OverflowError, UnicodeEncodeError):
        pass
    # an int beyond 64 bits or invalid text: check every item, to name it in the error
    walk = _Walk(path, shortcuts=False)
    try:
        return _buffers(_encoder.encode(walk.lower(value)), walk.leaves, path)
    except ValueError as exc:
        if isinstance(exc, LimitExceeded):
            raise
        raise InvalidValue(f"{path}: {exc}", path=path) from exc


def encode_many(values: Sequence[Any]) -> list[bytes] | None:
    """Encode the rows of a column of scalars, texts, bytes, and dicts of these. Return None if a
    row is something else, or if `encode` refuses it."""
    others = {*map(type, values)} - _PLAIN
    if dict in others and not all([_is_plain(v) for v in values if type(v) is dict]):
        return None
    others.discard(dict)
    if not all([issubclass(kind, np.generic) for kind in others]):
        return None
    try:
        if others:
            values = [_lowered_scalar(v) if type(v) in others else v for v in values]
        heads = list(map(_encoder.encode, values))
    except (InvalidValue, OverflowError, ValueError):
        return None
    if max(map(len, heads)) >= MAX_HEAD_BYTES:
        return None
    return [_SIZE.pack(len(head)) + head for head in heads]


def _is_plain(value: dict[Any, Any]) -> bool:
    """Return whether all keys and items of a dict are scalars, texts or bytes."""
    return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))


def _row(head: bytes, path: str) -> bytes:
    """Return a row without arrays, or the start of one with arrays."""
    if len(head) >= MAX_HEAD_BYTES:
        raise LimitExceeded(
            f"{path}: without its arrays, the value takes {len(head)} bytes, over the "
            f"limit of {MAX_HEAD_BYTES}: split the value into several fields",
            limit=MAX_HEAD_BYTES,
        )
    return _SIZE.pack(len(head)) + head


def _buffers(head: bytes, leaves: Sequence[Array], path: str) -> list[Buffer]:
    row = _row(head, path)
    buffers: list[Buffer] = [row]
    end = len(row)
    for leaf in leaves:
        buffers += (_PADDING[-end % OBJECT_ALIGNMENT_BYTES], raw(leaf))
        end = leaf.nbytes
    return buffers


def decode(row: bytes | memoryview, corrupt: Callable[[str], ValueCorrupt] = ValueCorrupt) -> Any:
    """Return the value of a row. Its arrays are read-only views of the row's memory. Raise
    what `corrupt` makes of the reason if the row is invalid."""
    nbytes = len(row)
    begin = _SIZE_BYTES + _SIZE.unpack_from(row)[0] if nbytes >= _SIZE_BYTES else -1
    if not 0 < begin <= nbytes:
        raise corrupt(
            f"the object is truncated: its head takes {max(begin, _SIZE_BYTES)} bytes, but the "
            f"whole object is only {nbytes} bytes long"
        )
    head, decoder = row[_SIZE_BYTES:begin], _WITHOUT_ARRAYS
    if nbytes > begin:
        arrays = memoryview(row)[begin + -begin % OBJECT_ALIGNMENT_BYTES :]
        decoder = _decoder_of(arrays.toreadonly())
    try:
        value = decoder.decode(head)
        if type(value) in _MAY_HOLD_TIME and _TIMESTAMP.search(head) and _holds_time(value):
            raise ValueCorrupt(
                "it holds a MessagePack timestamp (ext code -1), which is not part of this protocol"
            )
        return value
    except (ValueCorrupt, msgspec.MsgspecError, RecursionError, ValueError, TypeError) as exc:
        raise corrupt(f"the object cannot be decoded: {exc}") from exc


def _decoder_of(arrays: memoryview) -> msgspec.msgpack.Decoder[Any]:
    """arrays: the bytes behind the head."""
    if not arrays:
        return _WITHOUT_ARRAYS
    return msgspec.msgpack.Decoder(ext_hook=partial(_ext, arrays))


def _ext(arrays: memoryview, code: int, data: memoryview) -> Any:
    if code == EXT_ARRAY:
        return _array(arrays, _leaf_decoder.decode(data))
    if code == EXT_SCALAR:
        return _scalar(data)
    if code == EXT_TENSOR:
        return _tensor(_array(arrays, _leaf_decoder.decode(data)))
    if code == EXT_JAGGED:
        jagged = _jagged_decoder.decode(data)
        values, offsets = _array(arrays, jagged.values), _array(arrays, jagged.offsets)
        return _jagged(values, offsets, jagged.axis)
    if code == EXT_TUPLE:
        items = _decoder_of(arrays).decode(data)
        if type(items) is list:
            return tuple(items)
    elif code == EXT_INT:
        return int.from_bytes(data, "little", signed=True)
    raise ValueCorrupt(
        f"it holds MessagePack ext code {code} ({len(data)} bytes), which is not part of this "
        "protocol"
    )


def _array(arrays: memoryview, leaf: Leaf) -> Array:
    dtype, shape, offset = dtype_of(leaf.dtype), leaf.shape, leaf.offset
    nbytes = dtype.itemsize * math.prod(shape)
    if (
        len(shape) > MAX_RANK
        or any([length < 0 for length in shape])
        or offset < 0
        or offset % OBJECT_ALIGNMENT_BYTES
        or offset + nbytes > max(len(arrays), offset)
    ):
        raise ValueCorrupt(
            f"an array of dtype {dtype} and shape {shape} at byte {offset} does not fit in its "
            f"object's {len(arrays)} bytes of array data"
        )
    return np.ndarray(shape, dtype, arrays, offset if nbytes else 0)


_WITHOUT_ARRAYS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    ext_hook=partial(_ext, memoryview(b""))
)


class _Walk:
    """Converts one value to types that the encoder writes directly, and collects the arrays.

    `trail` has the keys down to the current item. With shortcuts, lists and dicts of plain scalars
    go to the encoder unchecked.
    """

    def __init__(self, path: str, shortcuts: bool = True) -> None:
        self.leaves: list[Array] = []
        self._end = 0
        """the end of the last leaf"""
        self._large: dict[bytes, tuple[Array, int]] = {}
        """by digest, the bytes and the offset of each large leaf"""
        self._path = path
        self._trail: list[object] = []
        self._shortcuts = shortcuts

    def lower(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value if self._shortcuts else self._checked(value)
        if kind is list or kind is tuple:
            items = value
            if not (self._shortcuts and _PLAIN.issuperset(map(type, value))):
                items = [self._below(index, item) for index, item in enumerate(value)]
            return items if kind is list else Ext(EXT_TUPLE, _encoder.encode(list(items)))
        if kind is dict:
            return self._dict(value)
        return self._leaf(value)

    def _below(self, key: object, value: object) -> Any:
        self._trail.append(key)
        if len(self._trail) >= MAX_NESTING:
            raise LimitExceeded(
                f"{self._place(8)}… is nested deeper than the limit of {MAX_NESTING} levels: "
                "flatten the value, or store it as JSON text",
                limit=MAX_NESTING,
            )
        lowered = self.lower(value)
        self._trail.pop()
        return lowered

    def _dict(self, value: dict[Any, Any]) -> Any:
        if self._shortcuts and _is_plain(value):
            return value
        if self._shortcuts and _PLAIN.issuperset(map(type, value)):
            return {key: self._below(key, item) for key, item in value.items()}
        # the encoder cannot hash keys that become ext values, so write the map item by item
        parts = [_map_header(len(value))]
        for key, item in value.items():
            lowered = self._below(key, key)
            if not _stays_key(key):
                raise self._refusal(
                    f"a dict has {kind_of(key)} as a key, which could not be read back as a key: "
                    "use a str, a number, bytes or a tuple of these"
                )
            parts.append(_encoder.encode(lowered))
            parts.append(_encoder.encode(self._below(key, item)))
        return msgspec.Raw(b"".join(parts))

    def _leaf(self, value: Any) -> Any:
        try:
            if isinstance(value, (bytearray, memoryview)):
                return _lowered_buffer(value)
            if isinstance(value, np.generic):
                return _lowered_scalar(value)
            plain = as_plain(value)
            if plain is not value:
                return self.lower(plain)
            if is_jagged(value):
                values, offsets, axis = jagged_parts(value)
                jagged = Jagged(self._placed(values), self._placed(offsets), axis)
                return Ext(EXT_JAGGED, _encoder.encode(jagged))
            array = as_array(value)
        except InvalidValue as exc:
            if "path" in exc.details:
                raise
            raise self._refusal(exc.message) from exc
        except DataplaneError:
            raise
        except Exception as exc:  # the value's own code: properties, serializers, a __getattr__
            raise self._refusal(
                f"{kind_of(value)} cannot be stored, because reading it raised "
                f"{type(exc).__name__}: {text_of(exc)}. "
                f"{remedy(exc, 'Convert it to an array or a dict first')}"
            ) from exc
        if array is None:
            raise self._refusal(_why_refused(value))
        leaf = _encoder.encode(self._placed(array))
        return Ext(EXT_TENSOR if is_torch(value) else EXT_ARRAY, leaf)

    def _placed(self, array: Array) -> Leaf:
        """Add an array to the row, unless the row has equal large bytes. Return its leaf."""
        name = dtype_name(array.dtype)
        assert name is not None, array.dtype
        if array.nbytes < ONCE_BYTES:
            return Leaf(name, array.shape, self._added(array))
        memory = raw(array).reshape(-1).view(np.uint8)
        digest = xxh3_128_digest(memory.data)
        known, offset = self._large.get(digest, (None, 0))
        if known is None or not np.array_equal(known, memory):
            offset = self._added(array)
            self._large[digest] = memory, offset
        return Leaf(name, array.shape, offset)

    def _added(self, array: Array) -> int:
        """Append a leaf. Return its offset."""
        if len(self.leaves) >= MAX_LEAVES_PER_ROW:
            raise LimitExceeded(
                f"{self._path} contains more than {MAX_LEAVES_PER_ROW} arrays: stack them, or "
                "spread them over several fields",
                limit=MAX_LEAVES_PER_ROW,
            )
        self.leaves.append(array)
        offset = self._end + -self._end % OBJECT_ALIGNMENT_BYTES
        self._end = offset + array.nbytes
        return offset

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            return Ext(EXT_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if type(value) is str:
            try:
                value.encode()
            except UnicodeEncodeError as exc:
                raise self._refusal(
                    f"{shown(value):.60} is not valid text ({exc.reason}): pass bytes, or "
                    "text.encode(errors='replace').decode()"
                ) from exc
        return value

    def _place(self, depth: int | None = None) -> str:
        keys = "".join(
            f'["{k:.60}"]' if type(k) is str else f"[{shown(k):.60}]" for k in self._trail[:depth]
        )
        # invalid text in a key could not be printed or logged
        return self._path + keys.encode(errors="backslashreplace").decode()

    def _refusal(self, reason: str) -> InvalidValue:
        return InvalidValue(f"{self._place()}: {reason}", path=self._place())


def _stays_key(key: object) -> bool:
    """Return whether a key of a dict is read back as a hashable value."""
    kind = type(key)
    if kind is tuple:
        items: Any = key
        return all(map(_stays_key, items))
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    return (
        kind in _PLAIN
        or kind is memoryview
        or issubclass(kind, np.generic)
        or issubclass(kind, tensor)
    )


def as_plain(value: Any) -> Any:
    """Convert an array of objects to lists, and a dataclass, a pydantic model or a TensorDict to a
    dict of its fields. Return any other value unchanged."""
    plain = _plainer(value)
    return value if plain is None else plain(value)


def has_plain(value: Any) -> bool:
    """Return whether `as_plain` converts this value."""
    return _plainer(value) is not None


def _plainer(value: Any) -> Callable[[Any], Any] | None:
    if isinstance(value, np.ndarray):
        return np.ndarray.tolist if value.dtype == object and type(value) is np.ndarray else None
    if is_tensordict(value):
        return _of_tensordict
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return None if hasattr(type(value), "__array__") else _of_dataclass
    model: Any = getattr(sys.modules.get("pydantic"), "BaseModel", ())
    return model.model_dump if isinstance(value, model) else None


def _of_dataclass(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _of_tensordict(value: Any) -> Any:
    library = sys.modules["tensordict"]
    if library.is_non_tensor(value):
        return value.data if isinstance(value, library.NonTensorData) else listed(value)
    odd = uneven_keys(tensordict_of(value))
    if odd is not None:
        key, lacking, having = odd
        raise InvalidValue(
            f"in this stack of TensorDicts, element {having} has the key {key!r}, but element "
            f"{lacking} does not: pass the list stack.unbind(0) instead of the stack"
        )
    return dict(value.items())


def is_tensordict(value: object) -> bool:
    """Return whether this is a TensorDict or a tensorclass, without importing tensordict."""
    library = sys.modules.get("tensordict")
    return library is not None and library.is_tensor_collection(value)


def tensordict_of(value: Any) -> Any:
    """Return the TensorDict of a tensorclass, whose own `get` unwraps non-tensor data; otherwise
    return the value itself."""
    return value._tensordict if sys.modules["tensordict"].is_tensorclass(value) else value


def listed(stack: Any) -> list[Any]:
    """Return the data of a NonTensorStack, one item per row; with several dimensions, nested
    lists."""
    return [
        listed(item) if sys.modules["tensordict"].is_non_tensor(item) else item
        for item in list(stack.tolist())
    ]


def uneven_keys(tensordict: Any) -> tuple[str, int, int] | None:
    """Return a key that only some members of a lazy stack have, a member without it and a member
    with it; None if there is no such key. The stack itself shows only keys that all members have.
    """
    if not isinstance(tensordict, sys.modules["tensordict"].LazyStackedTensorDict):
        return None
    members = list(map(tensordict_of, tensordict.tensordicts))
    has = [set(member.keys()) for member in members]
    uneven = set[str]().union(*has).difference(set.intersection(*has))
    if uneven:
        key = min(uneven)
        there = [key in keys for keys in has]
        return key, there.index(False), there.index(True)
    return next((odd for odd in map(uneven_keys, members) if odd is not None), None)


def _tensor(leaf: Array) -> Any:
    """Return a private tensor, because torch has no read-only memory; the array if torch is not
    installed."""
    try:
        return tensor_over(leaf.copy())
    except ImportError:
        return leaf
    except InvalidValue as exc:
        raise ValueCorrupt(f"it holds a tensor that torch cannot have: {exc.message}") from exc


def _jagged(values: Array, offsets: Array, axis: int) -> Any:
    if (
        offsets.dtype != np.int64
        or offsets.ndim != 1
        or len(offsets) < 1
        or not 0 <= axis < values.ndim
        or offsets[0] != 0
        or offsets[-1] != values.shape[axis]
        or (np.diff(offsets) < 0).any()
    ):
        raise ValueCorrupt("the offsets of a nested tensor do not match its values")
    try:
        import torch
    except ImportError:
        return np.split(values, offsets[1:-1], axis)
    nested: Any = torch.nested.nested_tensor_from_jagged
    lengths = np.diff(offsets).tolist()
    return nested(
        _tensor(values),
        tensor_over(offsets.copy()),
        jagged_dim=axis + 1,
        min_seqlen=min(lengths, default=0),
        max_seqlen=max(lengths, default=0),
    )


def _lowered_buffer(value: bytearray | memoryview) -> bytes:
    if isinstance(value, memoryview) and (value.format not in ("B", "b", "c") or value.ndim != 1):
        raise InvalidValue(
            f"storing a memoryview with format {value.format!r} and shape {list(value.shape or ())}"
            " would lose its format and shape: pass np.asarray(value), or value.tobytes() to "
            "store only the bytes"
        )
    return bytes(value)


def _lowered_scalar(value: Any) -> Ext:
    return Ext(EXT_SCALAR, _scalar_head(value.dtype) + value.tobytes())


@lru_cache(1024)
def _scalar_head(dtype: np.dtype[Any]) -> bytes:
    """The bytes before those of the item."""
    name = dtype_name(dtype)
    if name is None:
        kind = dtype.type.__name__
        raise InvalidValue(f"a numpy.{kind} cannot be stored: pass value.item()")
    return bytes((len(name),)) + name.encode()


def _scalar(data: memoryview) -> Any:
    end = 1 + data[0] if len(data) else 0
    dtype = dtype_of(str(data[1:end], "ascii"))
    if len(data) - end != dtype.itemsize:
        raise ValueCorrupt(
            f"a scalar of dtype {dtype} has {len(data) - end} bytes: expected "
            f"{dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype, 1, end)[0]


def _holds_time(value: Any) -> bool:
    """Return whether the value contains a time: msgspec decodes MessagePack timestamps anywhere."""
    if isinstance(value, dict):
        return any(_holds_time(key) or _holds_time(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(map(_holds_time, value))
    return isinstance(value, datetime)


def _map_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x80 | count,))
    if count < 1 << 16:
        return b"\xde" + count.to_bytes(2, "big")
    return b"\xdf" + count.to_bytes(4, "big")


def _why_refused(value: object) -> str:
    for base in (dict, list, tuple, int, float, str, bytes):
        if isinstance(value, base):
            kind = base.__name__
            return f"{kind_of(value)} would come back as a plain {kind}: pass {kind}(…)"
    return (
        f"{kind_of(value)} cannot be stored: pass None, bool, int, float, str, bytes, list, tuple, "
        "dict, an array, a dataclass or a pydantic model"
    )
