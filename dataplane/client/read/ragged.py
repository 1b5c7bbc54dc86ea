"""Rows of different lengths in one tensor: their axis, their lengths, and where each row begins.

Runs in the client. Pure numpy; torch is used where a caller has imported it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import index
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidCall, InvalidValue, sized
from dataplane.launch.values import allowed_memory_bytes
from dataplane.wire.arrays import Array, is_time, shown

Side = Literal["right", "left"]
_LARGE_BYTES = 1 << 30
"""Smaller tensors are made without a check of the free memory."""


class Ragged(NamedTuple):
    """Arrays of one dtype with shapes (*head, length, *tail), where only the length differs."""

    dtype: np.dtype[Any]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    lengths: list[int]

    @property
    def axis(self) -> int:
        """The axis of a row along which lengths differ."""
        return len(self.head)

    @property
    def ends(self) -> list[int]:
        """Where each row begins, and where the last one ends: n + 1 numbers."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows concatenated along the axis."""
        return (*self.head, sum(self.lengths), *self.tail)


def ragged_of(
    dtype: np.dtype[Any], shapes: Sequence[tuple[int, ...]], axis: int = 0
) -> Ragged | None:
    """Return the form of rows of these shapes. axis: the one to use if all shapes are equal. None
    if shapes differ along several axes, or are ()."""
    if len(set(map(len, shapes))) != 1 or not shapes[0]:
        return None
    columns = list(zip(*shapes, strict=True))
    differ = [at for at, lengths in enumerate(columns) if len(set(lengths)) > 1]
    if len(differ) > 1:
        return None
    axis = differ[0] if differ else axis
    first = shapes[0]
    return Ragged(dtype, first[:axis], first[axis + 1 :], list(columns[axis]))


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows are padded: with `value`, at their right or left, to the longest row, to `length`,
    or to the next multiple of `multiple`. Raises InvalidCall for anything else."""

    value: Any = 0
    side: Side = "right"
    length: int | None = None
    multiple: int | None = None

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise InvalidCall(f"side={self.side!r}: expected 'right' or 'left'")
        if self.length is not None and self.multiple is not None:
            raise InvalidCall("got both length= and multiple=: pass only one of them")
        for name in ("length", "multiple"):
            given = getattr(self, name)
            if given is None:
                continue
            number = index(given) if isinstance(given, SupportsIndex) else 0
            if isinstance(given, bool) or number < 1:
                raise InvalidCall(f"{name}={shown(given):.40}: expected a positive int")
            object.__setattr__(self, name, number)

    def width(self, field: str, lengths: Sequence[int]) -> int:
        """Return the length of each padded row. Raise InvalidValue if a row is longer than
        `length`."""
        longest = max(lengths, default=0)
        if self.length is not None:
            if longest > self.length:
                row = lengths.index(longest)
                raise InvalidValue(
                    f"field {field!r}: row {row} has length {longest}, more than "
                    f"length={self.length}: pass a larger length=, or truncate the rows before "
                    "the put",
                    field=field,
                    row=row,
                )
            return self.length
        step = self.multiple or 1
        return -(-longest // step) * step

    @property
    def is_default(self) -> bool:
        """Whether padding leaves rows of equal lengths unchanged. -0.0 equals 0, but has other
        bytes."""
        zero = type(self.value) in (int, float) and str(self.value) in ("0", "0.0")
        return zero and self.side == "right" and self.length is None and self.multiple is None

    def spans(self, lengths: Sequence[int], width: int) -> list[slice]:
        """Return where the values of each row are in its padded form."""
        if self.side == "left":
            return [slice(width - length, width) for length in lengths]
        return list(map(slice, lengths))

    def mask(self, lengths: Sequence[int], width: int) -> npt.NDArray[np.bool_]:
        """Return a bool array [n, width] that is True at values."""
        made = np.zeros((len(lengths), width), np.bool_)
        for row, span in enumerate(self.spans(lengths, width)):
            made[row, span] = True
        return made


def padding_value(field: str, padding: Padding, dtype: np.dtype[Any]) -> Array:
    """Return the padding as an array [] of this dtype.

    A float is rounded to the precision of a float dtype. Raise InvalidValue if the dtype cannot
    hold the value: a fraction or NaN among ints, -100 among bools, an int that would be rounded, a
    float that would become infinite, zero or NaN.
    """
    given = padding.value
    if getattr(given, "ndim", None) == 0 and not is_time(given):
        given = given.item()  # a scalar of numpy, a tensor of one number
    if type(given) in (bool, int, float, complex):
        made = _filling(given, str(given), dtype)
        if made is not None:
            return made
    fits = False if dtype == np.bool_ else 0 if _filling(0, "0", dtype) is not None else 1
    raise InvalidValue(
        f"field {field!r} has dtype {dtype.name}, which cannot represent "
        f"padding={shown(padding.value):.40}: choose a value that fits, or set the padding per "
        f"field, for example padding={{{field!r}: {fits}}}",
        field=field,
    )


@lru_cache(maxsize=256, typed=True)
def _filling(given: complex, text: str, dtype: np.dtype[Any]) -> Array | None:
    """Return a number as an array [] of this dtype; None if the dtype cannot hold it. text:
    distinguishes -0.0 from 0.0."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a complex number that loses a part of it
            # ml_dtypes refuses ints over 64 bits; the check below refuses ints that a float rounds
            number = float(given) if type(given) is int and dtype.kind not in "biu" else given
            made = np.full((), number, dtype)
        return made if _holds(made.item(), given) else None
    except (OverflowError, ValueError, TypeError):
        return None


def _holds(made: Any, given: Any) -> bool:
    """Whether a number kept its value, except for the rounding of a float."""
    if isinstance(made, complex) and isinstance(given, int):
        return made == given
    if isinstance(given, complex) or isinstance(made, complex):
        one, other = complex(made), complex(given)
        return _holds(one.real, other.real) and _holds(one.imag, other.imag)
    if given != given:
        return bool(made != made)
    if isinstance(given, float) and not isinstance(made, (bool, int)):
        return math.isfinite(made) == math.isfinite(given) and (
            made == given if math.isinf(given) or given == 0 else made != 0
        )
    return bool(made == given)


def check_padded(
    field: str, shape: Sequence[int], dtype: np.dtype[Any], *, on_host: bool = True
) -> None:
    """Raise InvalidValue for padded rows that take more memory than this process can have.

    numpy would raise MemoryError, or the kernel would kill the process while the rows are filled.
    on_host: False for a GPU, whose limit torch knows.
    """
    size = math.prod(length or 1 for length in shape) * dtype.itemsize  # as numpy counts
    if size <= _LARGE_BYTES:
        return
    most = min(allowed_memory_bytes() if on_host else sys.maxsize, sys.maxsize)
    if size > most:
        raise InvalidValue(
            f"field {field!r}: padded to shape {list(shape)}, the rows would take {sized(size)}, "
            f"but this process can use at most {sized(most)} of memory: pass a smaller length= "
            "or multiple=",
            field=field,
            size=size,
        )


def no_view(field: str, layout: str) -> InvalidValue:
    """The error for view=True if rows would have to be copied."""
    return InvalidValue(
        f"field {field!r}: these rows are not stored as a {layout} tensor, so view=True is not "
        "possible: leave out view=True, or use layout='list' for one view per row",
        field=field,
    )


def unlike(
    field: str, forms: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], layout: str
) -> InvalidValue:
    """The error for rows, given by dtype and shape, that do not form a tensor of this layout: which
    row differs from the first, how, and what to do."""
    first = forms[0]
    axes = zip(*(shape for _, shape in forms), strict=False)
    several = sum(len({*lengths}) > 1 for lengths in axes) > 1
    for differs, why, instead in (
        (
            lambda one: one[0] != first[0],
            "which differ in dtype",
            "give all rows the same dtype (a partition declared with "
            f"fields={{{field!r}: {_form_text(first)!r}}} rejects other dtypes)",
        ),
        (
            lambda one: len(one[1]) != len(first[1]),
            "which differ in rank",
            "give all rows the same rank (a partition declared with "
            f"fields={{{field!r}: {_form_text(first)!r}}} rejects other ranks)",
        ),
        (
            lambda one: one[1] != first[1],
            "which differ along several axes" if several else "which differ in length",
            "use layout='padded'" if several else "use layout='padded' or 'jagged'",
        ),
    ):
        row = next((at for at, one in enumerate(forms) if differs(one)), None)
        if row is not None:
            why = f"row {row} is {_shown(forms[row])} and row 0 is {_shown(first)}, {why}"
            instead += ", or use layout='list' for one tensor per row"
            return refused(field, row, layout, why, instead)
    why = f"each row is a single number ({_shown(first)})"
    return refused(field, 0, layout, why, "use layout='dense'")


def refused(field: str, row: int, layout: str, why: str, instead: str) -> InvalidValue:
    """The error for rows that do not form a tensor of this layout. row: the first wrong one."""
    tensor = {"auto": "tensor", "list": "list of tensors"}.get(layout, f"{layout} tensor")
    return InvalidValue(
        f"field {field!r}: {why}, so the rows do not form a {tensor}: {instead}",
        field=field,
        row=row,
    )


def _shown(form: tuple[np.dtype[Any], tuple[int, ...]]) -> str:
    return f"{form[0].name} {list(form[1])}"


def _form_text(form: tuple[np.dtype[Any], tuple[int, ...]]) -> str:
    """The form as a schema spells it, with any length along the first axis."""
    dtype, shape = form
    return f"{dtype.name}[{','.join(['*', *map(str, shape[1:])])}]" if shape else dtype.name


class Offsets:
    """Offset tensors, shared by fields with equal row lengths: torch combines only nested tensors
    that share their offsets."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, tuple[int, ...]], Any] = {}
        """by device and lengths"""

    def nested(self, values: Any, ragged: Ragged) -> Any:
        """A nested jagged tensor over these values, on their device."""
        torch = sys.modules["torch"]
        lengths = ragged.lengths
        named = (values.device, tuple(lengths))
        offsets = self._made.get(named)
        if offsets is None:
            ends = torch.from_numpy(np.array(ragged.ends, np.int64))
            offsets = self._made[named] = ends.to(values.device)
        nested: Any = torch.nested.nested_tensor_from_jagged
        # Without the lengths, torch waits for a GPU to find them, and to_padded_tensor pads each
        # row to the sum of all lengths.
        return nested(
            values,
            offsets,
            jagged_dim=ragged.axis + 1,
            min_seqlen=min(lengths, default=0),
            max_seqlen=max(lengths, default=0),
        )
