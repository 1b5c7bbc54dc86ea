"""A partition's schema: the dtype and shape that the values of a field must have.

"int64[*]" is a vector of any length in each row, "float32[3,*]" has three of them, "float32" is one
number, "bfloat16[...]" any shape, "object" a Python object (a text, a dict). It is part of the
partition's definition, and looked at by whoever puts, before the first byte leaves.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.errors import InvalidCall, InvalidValue, LimitExceeded, ProtocolError
from dataplane.wire.arrays import dtype_of, ragged_axis, shape_of
from dataplane.wire.limits import MAX_FIELDS, MAX_RANK
from dataplane.wire.tables import Spec

if TYPE_CHECKING:
    from dataplane.client.write.values import Prepared, Strip

_FORM = re.compile(r"\s*([a-z]\w*(?:\[\d*[a-zA-Z]+\])?)\s*(?:\[([^\[\]]*)\])?\s*")
_NEVER, _ANY = -2, -1


@dataclass(frozen=True, slots=True)
class Form:
    """dtype None: an object. shape None: any; a dimension None: any length."""

    dtype: np.dtype[Any] | None
    shape: tuple[int | None, ...] | None

    def length(self, spec: Spec) -> int:
        """How long a value of this spec must be along the axis that its bytes decide, where that
        matters; else _ANY, or _NEVER."""
        if self.dtype is None or spec.kind == "object":
            return _ANY if (self.dtype is None) == (spec.kind == "object") else _NEVER
        if dtype_of(spec.dtype) != self.dtype:
            return _NEVER
        if self.shape is None:
            return _ANY
        if len(self.shape) != len(spec.shape):
            return _NEVER
        ragged = ragged_axis(spec.shape)
        for axis, (wanted, given) in enumerate(zip(self.shape, spec.shape, strict=True)):
            if axis != ragged and wanted not in (None, given):
                return _NEVER
        wanted = None if ragged is None else self.shape[ragged]
        return _ANY if wanted is None else wanted


def canonical(fields: object) -> dict[str, str]:
    """What `fields=` of a partition says, each form written in one way. InvalidCall names a field
    whose form is none."""
    given = arguments.mapping(fields, "fields", "of field names to forms such as 'int64[*]'")
    if len(given) > MAX_FIELDS:
        raise LimitExceeded(
            f"the schema has {len(given)} fields, over the limit of {MAX_FIELDS}", limit=MAX_FIELDS
        )
    found: dict[str, str] = {}
    for name, text in given.items():
        arguments.text(name, "a field")
        try:
            if not isinstance(text, str):
                raise InvalidCall("it must be a str")
            found[name] = _written(parsed(text))
        except InvalidCall as exc:
            raise InvalidCall(
                f"fields[{name!r}]={text!r:.80}: {exc.message}. Use a dtype with the shape of a "
                "row, such as 'int64[*]', 'float32[3,*]' or 'bfloat16[...]'; 'float32' for one "
                "number; or 'object'"
            ) from exc
    return found


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> Form:
    """InvalidCall for what is no form."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidCall("this is not the form DTYPE or DTYPE[DIMENSIONS]")
    name, dimensions = match.groups()
    if name == "object" and dimensions is None:
        return Form(None, None)
    try:
        dtype = dtype_of(name)
    except ProtocolError:
        raise InvalidCall(f"{name!r} is not a dtype") from None
    if dimensions is None or not dimensions.strip():
        return Form(dtype, ())
    if dimensions.strip() == "...":
        return Form(dtype, None)
    parts = [part.strip() for part in dimensions.split(",")]
    if len(parts) > MAX_RANK:
        raise InvalidCall(f"{len(parts)} dimensions exceed the limit of {MAX_RANK}")
    if not all(p == "*" or re.fullmatch(r"\d{1,18}", p) for p in parts):
        raise InvalidCall("each dimension must be a number, or * for any length")
    return Form(dtype, tuple(None if part == "*" else int(part) for part in parts))


def _written(form: Form) -> str:
    if form.dtype is None:
        return "object"
    if form.shape is None:
        return f"{form.dtype.name}[...]"
    dimensions = ",".join("*" if n is None else str(n) for n in form.shape)
    return f"{form.dtype.name}[{dimensions}]" if dimensions else form.dtype.name


def empty_dtype(text: str | None) -> np.dtype[Any]:
    """What an empty list of numbers is made of, where no other value of its column tells."""
    dtype = None if text is None else parsed(text).dtype
    return np.dtype(np.int64) if dtype is None else dtype


def check(prepared: Prepared, fields: Mapping[str, str]) -> None:
    """InvalidValue for the first value that is not as the schema has its field."""
    for column in prepared.columns:
        text = fields.get(column.field)
        if text is None:
            continue
        form, values = parsed(text), column.values
        row = _first_wrong([form.length(spec) for spec in prepared.specs], values, prepared.specs)
        if row is None:
            continue
        found = _told(prepared.specs[_at(values.specs, row)], int(_at(values.sizes, row)))
        raise InvalidValue(
            f"nothing was put: {column.field}[{row}] is {found}, but this partition declares "
            f"{column.field!r} as {text}: {_advice(form)}, or change the declaration",
            field=column.field,
            row=row,
            expected=text,
            found=found,
        )


def _first_wrong(lengths: list[int], values: Strip, specs: list[Spec]) -> int | None:
    numbers = np.broadcast_to(np.asarray(values.specs, np.intp), values.count)
    wanted = np.array(lengths)[numbers]
    wrong = wanted == _NEVER
    for number in np.unique(numbers[wanted >= 0]).tolist():
        of_this = numbers == number
        wrong |= of_this & (_lengths(specs[number], values.sizes, values.count) != lengths[number])
    return int(np.argmax(wrong)) if wrong.any() else None


def _lengths(spec: Spec, sizes: int | npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """Along the axis that the bytes decide."""
    step = dtype_of(spec.dtype).itemsize * -math.prod(spec.shape)
    return np.broadcast_to(np.asarray(sizes, np.int64), n) // step


def _at(values: int | npt.NDArray[Any], row: int) -> int:
    return values if isinstance(values, int) else int(values[row])


def _told(spec: Spec, nbytes: int) -> str:
    if spec.kind == "object":
        return "a Python object"
    dtype = dtype_of(spec.dtype)
    return _written(Form(dtype, shape_of(spec, dtype.itemsize, nbytes)))


def _advice(form: Form) -> str:
    if form.dtype is None:
        return "pass dataplane.object(value)"
    return f"pass np.asarray(value, {form.dtype.name!r}) of that shape"
