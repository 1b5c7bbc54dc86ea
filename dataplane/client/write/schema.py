"""A partition's schema: the dtype and shape that the values of a field must have.

"int64[*]" is a vector of any length in each row, "float32[3,*]" has three of them, "float32" is one
number, "bfloat16[...]" any shape, "object" a Python object (a text, a dict). It is part of the
partition's definition, which `definition_of` makes. A put checks its values before it sends a byte.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dataplane.client import arguments
from dataplane.errors import InvalidCall, InvalidValue, LimitExceeded, ValueCorrupt
from dataplane.wire.arrays import dtype_of, shown
from dataplane.wire.layouts import OPEN, ColumnSpec
from dataplane.wire.limits import MAX_FIELDS, MAX_RANK
from dataplane.wire.packed import U4
from dataplane.wire.tables import Definition

if TYPE_CHECKING:
    from dataplane.client.write.columns import ValueColumn

_FORM = re.compile(r"\s*([a-z]\w*(?:\[\d*[a-zA-Z]+\])?)\s*(?:\[([^\[\]]*)\])?\s*")


@dataclass(frozen=True, slots=True)
class FieldForm:
    """dtype None: an object. shape None: any; a dimension None: any length."""

    dtype: np.dtype[Any] | None
    shape: tuple[int | None, ...] | None

    def takes(self, spec: ColumnSpec) -> bool:
        """Whether every value of this spec is of this form, whatever its open axes are."""
        if self.dtype is None or spec.kind != "array":
            return self.dtype is None and spec.kind != "array"
        return self.takes_array(dtype_of(spec.dtype), spec.shape)

    def takes_array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """Whether an array is of this form."""
        if self.dtype is None or dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            [wanted in (None, given) for wanted, given in zip(self.shape, shape, strict=True)]
        )


def definition_of(
    stages: Mapping[str, Sequence[str]] | None,
    group_size: int | None,
    groups: int | None,
    free: str | None,
    replicas: int,
    fields: Mapping[str, str] | None = None,
) -> Definition | None:
    """Return the definition from the arguments of `partition(…)`; None if they only attach."""
    copies = arguments.integer(replicas)
    if copies == 1 and all(one is None for one in (stages, group_size, groups, free, fields)):
        return None
    form = "of stage names to lists of fields"
    needs = {} if stages is None else arguments.mapping(stages, "stages", form)
    if group_size is not None:
        group_size = arguments.count(group_size, "group_size")
    if groups is not None:
        groups = arguments.count(groups, "groups")
    free = ("acked" if needs else "drop") if free is None else free
    arguments.choice(free, "free", "acked", "drop")
    if copies not in (1, 2):
        raise InvalidCall(
            f"replicas={shown(replicas):.80}: expected 1, or 2 to keep a second copy on another "
            "peer"
        )
    named: dict[str, list[str]] = {}
    for stage, needed in needs.items():
        named[arguments.text(stage, "a stage")] = arguments.texts(needed, f"stages[{stage!r}]")
    return Definition(
        named,
        group_size,
        groups,
        free,  # type: ignore[arg-type]
        copies,  # type: ignore[arg-type]
        canonical({} if fields is None else fields),
    )


def canonical(fields: object) -> dict[str, str]:
    """Return `fields=` of a partition with each form in canonical spelling. Raise InvalidCall,
    which names the field, for an invalid form."""
    given = arguments.mapping(fields, "fields", "of field names to forms such as 'int64[*]'")
    if len(given) > MAX_FIELDS:
        raise LimitExceeded(
            f"fields= names {len(given)} fields, but a partition can have at most {MAX_FIELDS}: "
            "use fewer fields, for example by storing several values in one dict",
            limit=MAX_FIELDS,
        )
    found: dict[str, str] = {}
    for name, text in given.items():
        arguments.text(name, "a field")
        try:
            if not issubclass(type(text), str):  # isinstance asks the object's own code
                raise InvalidCall("expected a str")
            found[name] = _written(parsed(str.__str__(text)))  # subclasses hash by own code
        except InvalidCall as exc:
            raise InvalidCall(
                f"fields[{name!r}]={shown(text):.80}: {exc.message}. Use a dtype with the shape "
                "of one row ('int64[*]', 'float32[3,*]', 'bfloat16[...]'), a dtype alone if each "
                "row is a single number ('float32'), or 'object'"
            ) from exc
    return found


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> FieldForm:
    """Return a parsed form. Raise InvalidCall if it is invalid."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidCall("expected DTYPE or DTYPE[DIMENSIONS]")
    name, dimensions = match.groups()
    if name == "object" and dimensions is None:
        return FieldForm(None, None)
    try:
        dtype = dtype_of(name)
    except ValueCorrupt:
        raise InvalidCall(
            f"unknown dtype {name!r:.80}: use a name such as 'int64', 'float32' or 'bfloat16'"
        ) from None
    if dimensions is None or not dimensions.strip():
        return FieldForm(dtype, ())
    if dimensions.strip() == "...":
        return FieldForm(dtype, None)
    parts = [part.strip() for part in dimensions.split(",")]
    if len(parts) > MAX_RANK:
        raise InvalidCall(f"expected at most {MAX_RANK} dimensions, got {len(parts)}")
    if not all(p == "*" or re.fullmatch(r"\d{1,18}", p) for p in parts):
        raise InvalidCall("each dimension must be a number, or * for any length")
    return FieldForm(dtype, tuple(None if part == "*" else int(part) for part in parts))


def _written(form: FieldForm) -> str:
    if form.dtype is None:
        return "object"
    if form.shape is None:
        return f"{form.dtype.name}[...]"
    dimensions = ",".join("*" if n is None else str(n) for n in form.shape)
    return f"{form.dtype.name}[{dimensions}]" if dimensions else form.dtype.name


def empty_dtype(text: str | None) -> np.dtype[Any]:
    """The dtype of an empty list of numbers if no other value of its column determines it."""
    dtype = None if text is None else parsed(text).dtype
    return np.dtype(np.int64) if dtype is None else dtype


def check(columns: Iterable[ValueColumn], fields: Mapping[str, str]) -> None:
    """Raise InvalidValue for the first value that does not match the schema."""
    for column in columns:
        text = fields.get(column.field)
        if text is None:
            continue
        form = parsed(text)
        row = _first_wrong(form, column)
        if row is None:
            continue
        found = _actual_form(column, row)
        raise InvalidValue(
            f"nothing was stored: {column.field}[{row}] is {found}, but this partition declares "
            f"{column.field!r} as {text}: {_advice(form)}, or change the declaration",
            field=column.field,
            row=row,
            expected=text,
            found=found,
        )


def _first_wrong(form: FieldForm, column: ValueColumn) -> int | None:
    if column.mixed:
        wrong = [not form.takes_array(dtype, shape) for dtype, shape in column.mixed]
        return wrong.index(True) if True in wrong else None
    spec = column.spec
    if form.takes(spec):
        return None
    if spec.kind != "array" or form.dtype is None or not spec.width:
        return 0
    dtype = dtype_of(spec.dtype)
    for row in range(column.count):
        if not form.takes_array(dtype, _shape(column, row)):
            return row
    return None


def _shape(column: ValueColumn, row: int) -> tuple[int, ...]:
    """The shape of a row of an array column."""
    own = iter(np.frombuffer(column.lengths_of(row), U4).tolist())
    return tuple([next(own) if length == OPEN else length for length in column.spec.shape])


def _actual_form(column: ValueColumn, row: int) -> str:
    if column.mixed:
        return _written(FieldForm(*column.mixed[row]))
    if column.spec.kind != "array":
        return "a Python object"
    return _written(FieldForm(dtype_of(column.spec.dtype), _shape(column, row)))


def _advice(form: FieldForm) -> str:
    if form.dtype is None:
        return "pass dataplane.object(value)"
    name = form.dtype.name
    # NumPy does not know the names of other libraries' dtypes.
    dtype = f"ml_dtypes.{name}" if hasattr(ml_dtypes, name) else repr(name)
    return f"pass np.asarray(value, {dtype}) in the declared shape"
