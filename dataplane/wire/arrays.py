"""Names of dtypes in messages, and conversion of arrays of any library to plain NumPy arrays.

Arrays of NumPy, torch, cupy, jax and any library with `__array_interface__`, `__array__` or DLPack
are accepted, without importing the library. The result is always a NumPy array in native byte
order. Masked, structured, text and object arrays are refused, because their bytes alone do not
determine their values.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, InvalidValue, ValueCorrupt
from dataplane.wire.limits import MAX_RANK

Array = npt.NDArray[Any]
ArrayForm = tuple[np.dtype[Any], tuple[int, ...]]
"""dtype and shape of an array"""

_BUILTIN: tuple[type[np.generic], ...] = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.longdouble),
    *(np.complex64, np.complex128, np.clongdouble),
)
_EXTENSIONS = [
    kind
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
_BY_NAME: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind) for kind in (*_BUILTIN, *_EXTENSIONS)
}
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _BY_NAME.items()}
_TIME = re.compile(r"(datetime64|timedelta64)(\[\d{0,10}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")

_AS_INTEGERS = {
    "bfloat16": "int16",
    "complex32": "int32",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Torch dtypes that numpy has only through ml_dtypes, and the integers of the same width."""


MAX_TEXT = 400
_OF_OTHERS = 2
"""`dtype.isbuiltin` of the dtypes of ml_dtypes. numpy's own have 1, or 0 if they have metadata or
were converted to native byte order."""

_INTEGERS_OF_TORCH = {1: "uint8", 2: "int16", 4: "int32"}


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype in messages; None for an unsupported dtype or byte order."""
    name = _NAMES.get(dtype)
    if name is None and dtype.kind in "mM" and dtype.isnative:
        return dtype.name
    return name


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name from a layout. Raise ValueCorrupt for an unknown name."""
    dtype = _BY_NAME.get(name)
    if dtype is not None:
        return dtype
    if len(name) < 32 and _TIME.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError):
            pass
    raise ValueCorrupt(f"dtype {name[:64]!r} is not part of this protocol")


def is_ready(value: object) -> bool:
    """Return whether `as_array` would return the value unchanged. A fast check for most values."""
    return (
        type(value) is np.ndarray
        and value.dtype in _NAMES
        and value.flags.c_contiguous
        and value.ndim <= MAX_RANK
    )


def as_array(value: object) -> Array | None:
    """Return `value` as a plain, contiguous NumPy array in native byte order, without a copy if it
    already is one.

    Return None if it is not an array. Raise InvalidValue if it is an array that cannot be stored,
    or its own conversion fails; the caller adds the field and row to the message. Tensors are
    detached, and copied from a device to the host.
    """
    try:
        return _as_array(value)
    except InvalidValue:
        raise
    except Exception as exc:  # an error of another library or of the user
        raise InvalidValue(
            f"{kind_of(value)} cannot be converted to a NumPy array: {type(exc).__name__}: "
            f"{text_of(exc)}. {remedy(exc, 'Pass a NumPy array of its values instead')}"
        ) from exc


def _as_array(value: object) -> Array | None:
    array = value if isinstance(value, np.ndarray) else _foreign(value)
    if array is None:
        return None
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidValue(
                "storing a masked array would lose its mask: pass .data and .mask as two fields"
            )
        _check_unit(array)
        array = np.asarray(array)
    if dtype_name(array.dtype) is None:
        array = _native(array)
    if array.ndim > MAX_RANK:
        raise InvalidValue(
            f"the array has {array.ndim} dimensions, over the limit of {MAX_RANK}: reshape it "
            "to fewer dimensions"
        )
    # not ascontiguousarray, which would turn 0-d into 1-d
    return array if array.flags.c_contiguous else np.array(array, order="C")


def is_time(value: Any) -> bool:
    """Return whether this is a NumPy date or duration. Their `item` and `tolist` return ints for
    units that Python lacks."""
    return getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")


def is_torch(value: object) -> bool:
    """Return whether this is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def is_jagged(value: Any) -> bool:
    """Return whether this is a nested tensor with torch's jagged layout."""
    return is_torch(value) and value.is_nested and value.layout is sys.modules["torch"].jagged


def jagged_parts(tensor: Any) -> tuple[Array, Array, int]:
    """Return the values of a nested jagged tensor, the int64 offsets of its rows and of the end,
    and the ragged axis of a row. The rows are adjacent in the values along that axis.

    Raises InvalidValue as `as_array` does. Gaps between rows are removed.
    """
    axis = tensor._ragged_idx - 1
    values, offsets = as_array(tensor.values()), np.asarray(tensor.offsets().cpu(), np.int64)
    assert values is not None
    given = tensor.lengths()
    lengths = np.diff(offsets) if given is None else np.asarray(given.cpu(), np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if len(lengths) and (ends[-1] != values.shape[axis] or (offsets[:-1] != ends[:-1]).any()):
        starts = np.repeat(offsets[: len(lengths)] - ends[:-1], lengths)
        values = values.take(starts + np.arange(ends[-1]), axis)
    return values, ends, axis


def tensor_over(array: Array) -> Any:
    """Return a torch tensor over this array's memory. Raise InvalidValue if torch lacks the
    dtype."""
    import torch

    dtype = array.dtype
    if not array.size:  # torch does not work with numpy's strides of an empty array
        return torch.empty(array.shape, dtype=tensor_over(np.zeros(1, dtype)).dtype)
    try:
        if dtype.isbuiltin == 1:
            return torch.from_numpy(array)
        # torch's own 4-bit and 2-bit dtypes store their bits otherwise than ml_dtypes
        wide = getattr(torch, dtype.name) if dtype.name in _AS_INTEGERS else None
        if wide is not None:
            return torch.from_numpy(array.view(_INTEGERS_OF_TORCH[dtype.itemsize])).view(wide)
    except (TypeError, AttributeError):
        pass
    raise InvalidValue(
        f"torch does not support dtype {dtype}: convert the values to another dtype before the put"
    )


def raw(array: Array) -> Array:
    """Return the same array with a dtype that the buffer protocol supports."""
    if array.dtype.isbuiltin != _OF_OTHERS and array.dtype.kind in "biufc":
        return array
    # every other dtype here is as wide as an integer; 0-d arrays keep their width in a view
    return array.view(f"u{array.itemsize}")


def _native(array: Array) -> Array:
    # NumPy's texts of any length have no byte order
    swapped = array.dtype if array.dtype.kind == "T" else array.dtype.newbyteorder("=")
    if dtype_name(swapped) is not None:
        return array.byteswap().view(swapped)  # astype leaves times without a unit as they are
    dtype = array.dtype
    if dtype.kind in "UST":
        hint = "it holds text: pass array.tolist()"
    elif dtype.hasobject:
        hint = "it holds Python objects: pass array.tolist()"
    else:
        hint = "it is a structured array: pass its parts as separate fields"
    raise InvalidValue(f"an array of dtype {dtype} cannot be stored, because {hint}")


def kind_of(value: object) -> str:
    """Return the class of a value for an error, such as `a torch.Tensor` or `an int`."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shown(value: object) -> str:
    """Return the representation of a user's value for an error. `repr` itself may fail, such as
    NumPy's for a time without a unit, or crash the process, such as torch's for a tensor whose
    memory was freed."""
    try:
        if is_torch(value):
            tensor: Any = value
            return f"<{kind_of(value)} {str(tensor.dtype)[6:]}{list(tensor.shape)}>"
        # foreign text may contain half of a surrogate pair, which a log cannot print
        return repr(value).encode(errors="backslashreplace").decode()
    except Exception:
        return f"<{kind_of(value)}>"


def shortened(value: object, length: int) -> str:
    """Return at most `length` characters that show a stored value. The value is not an array."""
    try:
        return reprlib.repr(value)[:length]
    except ValueError:  # an int of more digits than Python converts
        return shown(value)[:length]


def preview(array: Array, count: int) -> str:
    """Return the first `count` values of an array on one line, such as `1, 2, …`."""
    flat = array.reshape(-1)
    more = ", …" if flat.size > count else ""
    # `tolist` turns dates and durations of some units into ints
    few = map(_time_text, flat[:count]) if is_time(array) else map(str, flat[:count].tolist())
    return ", ".join(few) + more


def _time_text(time: Any) -> str:
    try:
        return str(time)
    except ValueError:  # NumPy cannot print a date without a unit
        return str(time.astype(np.int64))


def text_of(exc: Exception) -> str:
    """Return the message of an exception that foreign code raised, cut to MAX_TEXT characters. Its
    `__str__` may fail too."""
    try:
        text = str(exc).encode(errors="backslashreplace").decode()
    except Exception:
        text = shown(exc)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def remedy(exc: Exception, otherwise: str) -> str:
    """Return what a caller can do after a user's value has raised `exc`."""
    return "Pass fewer or smaller values" if isinstance(exc, MemoryError) else otherwise


def _foreign(value: object) -> Array | None:
    if isinstance(value, (type, str, bytes, list, tuple, dict, np.generic)):
        return None
    if is_torch(value):
        return _from_torch(value, sys.modules["torch"])
    if hasattr(value, "getpalette"):
        if getattr(value, "palette", None) is not None:
            raise InvalidValue(
                "storing a PIL image with a palette would lose the palette: pass "
                "image.convert('RGB')"
            )
        if "transparency" in getattr(value, "info", ()):
            raise InvalidValue(
                "storing a PIL image with a transparent color would lose the transparency: pass "
                "image.convert('RGBA')"
            )
    if hasattr(value, "__cuda_array_interface__"):
        # cupy refuses silent copies to the host; `get` is its word for an intended one
        return np.asarray(value.get() if hasattr(value, "get") else value)
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        _check_unit(value)
        _check_columnar(value)
        return np.asanyarray(value)  # `__array__` may return a masked array
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    return None


def _check_unit(value: Any) -> None:
    """Raise InvalidValue for a quantity of astropy, pint or unyt: an array has no unit."""
    for unit in (getattr(value, "unit", None), getattr(value, "units", None)):
        if unit is None or callable(unit):
            continue
        raise InvalidValue(
            f"{kind_of(value)} has the unit {str(unit)!r:.40}, which a NumPy array cannot hold: "
            "pass the numbers without the unit, and store the unit as a tag"
        )


_INTERVAL = "month_day_nano_interval"


def is_interval(column: object) -> bool:
    """Whether an Arrow or pandas object has calendar intervals in it. NumPy 2.4 crashes on one from
    pyarrow 26."""
    return _INTERVAL in f"{getattr(column, 'type', '')} {getattr(column, 'dtype', '')}"


def _check_columnar(column: Any) -> None:
    """Raise InvalidValue for an Arrow, Polars or pandas object that would lose something in NumPy:
    nulls in an array become NaN, times lose their zone, and a table loses its names and dtypes."""
    if hasattr(column, "column_names") or hasattr(column, "columns"):
        raise InvalidValue(
            f"storing {kind_of(column)} would lose the names and types of its columns: pass each "
            "column as a field, or pass a list of dicts from .to_pylist() or .to_dict('records')"
        )
    if is_interval(column):
        raise InvalidValue(
            f"{kind_of(column)} has values of the Arrow type {_INTERVAL}, which NumPy cannot hold: "
            "pass the months, days and nanoseconds as three fields"
        )
    for chunk in getattr(column, "chunks", None) or ():
        _check_columnar(chunk)
    # Arrow counts no nulls among the values of a dictionary, or of runs
    encoded = (getattr(column, name, None) for name in ("dictionary", "values"))
    nulls = getattr(column, "null_count", 0)
    nulls = nulls() if callable(nulls) else nulls
    if nulls or any(getattr(values, "null_count", 0) for values in encoded):
        raise InvalidValue(
            f"{kind_of(column)} contains nulls, which a NumPy array cannot hold: pass a list "
            "from .to_pylist() or .to_list(), in which nulls are None"
        )
    zone = getattr(getattr(column, "type", None), "tz", None)
    if zone is not None:
        raise InvalidValue(
            f"{kind_of(column)} has timezone-aware timestamps ({zone!r}), which a NumPy array "
            "cannot hold: cast them to naive timestamps, and store the time zone as a tag"
        )


def _from_torch(tensor: Any, torch: Any) -> Array:
    if tensor.is_nested:
        raise InvalidValue(
            "a nested tensor with strided layout cannot be stored: pass list(tensor.unbind())"
        )
    if tensor.is_meta:
        raise InvalidValue(
            "a meta tensor has no values to store: pass a tensor on the CPU or a GPU"
        )
    if tensor.is_quantized:
        raise InvalidValue("a quantized tensor cannot be stored: pass tensor.dequantize()")
    if tensor.layout is not torch.strided:
        raise InvalidValue(
            f"a tensor with layout {tensor.layout} cannot be stored: pass tensor.to_dense()"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        _check_storage(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        if name in _AS_INTEGERS:
            integers: Array = tensor.view(getattr(torch, _AS_INTEGERS[name])).numpy()
            return integers.view(_BY_NAME[name])
        plain: Array = tensor.numpy()
        return plain
    except InvalidValue:
        raise
    except TypeError as exc:
        raise InvalidValue(
            f"a torch tensor of dtype {name} cannot be converted to NumPy ({text_of(exc)}): "
            "cast it to another dtype"
        ) from exc
    except RuntimeError as exc:
        raise InvalidValue(
            f"{kind_of(tensor)} cannot be converted to NumPy ({text_of(exc).strip(' .')}): pass a "
            "plain CPU tensor of its values, for example full_tensor() of a DTensor"
        ) from exc


def _check_storage(tensor: Any) -> None:
    """Raise InvalidValue for a tensor whose memory was freed, for example by FSDP or offloading.
    NumPy would read other memory of this process."""
    storage, needed = tensor.untyped_storage(), tensor.nbytes
    there = storage.nbytes() if storage.data_ptr() else 0
    if there == needed and not tensor.storage_offset() and tensor.is_contiguous():
        return
    if needed:
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        items = tensor.storage_offset() + 1 + sum([(n - 1) * step for n, step in strides])
        needed = items * tensor.element_size()
    if there < needed:
        raise InvalidValue(
            f"the tensor's values need {needed} bytes of memory, but its storage has {there}: its "
            "memory was freed or never allocated. Put the tensor before its memory is freed, or "
            "gather its values first"
        )


# objects of the user, whose own `__iter__`, `__getitem__` or `__repr__` may raise


P = ParamSpec("P")
T = TypeVar("T")
Reader = Callable[Concatenate[Any, P], T]


def reader(error: type[DataplaneError], what: str = "") -> Callable[[Reader[P, T]], Reader[P, T]]:
    """Decorate a function that reads a user's object, its first argument. Exceptions of the
    object's own code become `error`. what: names the object; default: the second argument."""

    def decorate(read: Reader[P, T]) -> Reader[P, T]:
        @wraps(read)
        def guarded(value: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return read(value, *args, **kwargs)
            except DataplaneError:
                raise
            except Exception as exc:
                raise unreadable(what or str(args[0]), value, exc, error) from exc

        return guarded

    return decorate


def unreadable(
    what: str,
    value: object,
    exc: Exception,
    error: type[DataplaneError] = InvalidValue,
    **details: Any,
) -> DataplaneError:
    """Return the error for a value whose own code has raised `exc`. what: names the value."""
    return error(
        f"{what} is {kind_of(value)}, which cannot be read: {type(exc).__name__}: "
        f"{text_of(exc)}. {remedy(exc, 'Pass a list, or an array, of plain values')}",
        **details,
    )


def items_of(
    what: str, values: Iterable[Any], error: type[DataplaneError] = InvalidValue, **details: Any
) -> list[Any]:
    """Return the entries of an iterable as a list. The error has the index of the entry that could
    not be read as `row`."""
    if type(values) is list:
        return values
    found: list[Any] = []
    try:
        found.extend(values)
    except DataplaneError:
        raise
    except Exception as exc:
        where = f"{what} at index {len(found)}" if found else what
        raise unreadable(where, values, exc, error, row=len(found), **details) from exc
    return found


def pairs_of(
    what: str, mapping: Mapping[Any, Any], error: type[DataplaneError] = InvalidValue
) -> dict[Any, Any]:
    """Return a mapping as a dict."""
    if type(mapping) is dict:
        return mapping
    try:
        return dict(mapping.items())
    except DataplaneError:
        raise
    except Exception as exc:
        raise unreadable(what, mapping, exc, error) from exc
