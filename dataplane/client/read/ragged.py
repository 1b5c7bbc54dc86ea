"""Rows of different lengths in one tensor: along which axis, how far, and where each begins.

Runs in the client. Pure numpy; torch is used where a caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidCall, InvalidValue
from dataplane.wire.arrays import Array

Ints = npt.NDArray[np.int64]
Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays of one dtype whose shapes are `head`, a length of their own, `tail`."""

    dtype: np.dtype[Any]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    lengths: Ints

    @property
    def axis(self) -> int:
        """Of a row, the axis of its own length."""
        return len(self.head)

    @cached_property
    def ends(self) -> Ints:
        """Where each row begins, and where the last one ends: one number more than rows."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows side by side along the axis."""
        return (*self.head, int(self.ends[-1]), *self.tail)


def ragged_of(
    dtype: np.dtype[Any], shapes: Sequence[tuple[int, ...]], axis: int = 0
) -> Ragged | None:
    """Rows of these shapes. axis: which one it is where none differs. None where shapes differ in
    several, or have none."""
    if len(set(map(len, shapes))) != 1 or not shapes[0]:
        return None
    columns = list(zip(*shapes, strict=True))
    differ = [at for at, lengths in enumerate(columns) if len(set(lengths)) > 1]
    if len(differ) > 1:
        return None
    axis = differ[0] if differ else axis
    first = shapes[0]
    return Ragged(dtype, first[:axis], first[axis + 1 :], np.array(columns[axis], np.int64))


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows are filled up: with `value`, at their right or left, to the longest, or to `length`,
    or to the next multiple of `multiple` behind the longest. InvalidCall for anything else."""

    value: float = 0
    side: Side = "right"
    length: int | None = None
    multiple: int | None = None

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise InvalidCall(f"side={self.side!r}: rows are padded at the 'right' or the 'left'")
        if self.length is not None and self.multiple is not None:
            raise InvalidCall("give length= or multiple=, not both")
        for name in ("length", "multiple"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise InvalidCall(f"{name}={given!r:.40}: it must be a positive int")

    def width(self, field: str, lengths: Ints) -> int:
        """How long each row becomes. InvalidValue for one that is longer than `length`."""
        longest = int(lengths.max(initial=0))
        if self.length is not None:
            if longest > self.length:
                row = int(np.argmax(lengths))
                raise InvalidValue(
                    f"{field}: row {row} is {longest} long, length={self.length}: give a larger "
                    "one, or cut the rows before they are put",
                    field=field,
                    row=row,
                )
            return self.length
        step = self.multiple or 1
        return -(-longest // step) * step

    def span(self, length: int, width: int) -> slice:
        """Where a row lies in its padded form."""
        return slice(width - length, width) if self.side == "left" else slice(length)

    def mask(self, lengths: Ints, width: int) -> npt.NDArray[np.bool_]:
        """bool [n, width]: where values are."""
        at = np.arange(width)
        if self.side == "left":
            return at >= width - lengths[:, None]
        return at < lengths[:, None]


RIGHT = Padding()


def padded(field: str, rows: Sequence[Array], axis: int, padding: Padding, array: Any) -> None:
    """Write rows into an array [n, ...] that is as wide as they become."""
    array[...] = padding_value(field, padding, array.dtype)
    width = array.shape[1 + axis] if array.ndim > 1 else 0
    for target, row in zip(array, rows, strict=True):
        spans = [slice(length) for length in row.shape]
        if spans:
            spans[axis] = padding.span(row.shape[axis], width)
        target[tuple(spans)] = row


def padding_value(field: str, padding: Padding, dtype: np.dtype[Any]) -> Any:
    """The padding as a number of this dtype. InvalidValue where it has none."""
    try:
        return np.full((), padding.value, dtype)
    except (OverflowError, ValueError, TypeError) as exc:
        raise InvalidValue(f"{field}: {padding.value!r} is no {dtype}: {exc}") from exc


class Offsets:
    """Tensors of offsets, of which rows of equal lengths share one: torch lets nested tensors be
    used together that have the same."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Any] = {}

    def nested(self, values: Any, ragged: Ragged) -> Any:
        """A nested jagged tensor over these values, on their device."""
        torch = sys.modules["torch"]
        named = (str(values.device), ragged.ends.tobytes())
        offsets = self._made.get(named)
        if offsets is None:
            offsets = self._made[named] = torch.from_numpy(ragged.ends).to(values.device)
        return torch.nested.nested_tensor_from_jagged(
            values,
            offsets,
            jagged_dim=ragged.axis + 1,
            min_seqlen=int(ragged.lengths.min()) if len(ragged.lengths) else 0,
            max_seqlen=int(ragged.lengths.max(initial=0)),
        )
