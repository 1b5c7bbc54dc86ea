"""Views over runs of chunks, beside plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.read.chunk_columns import ChunkForm
from dataplane.client.read.column_view import ColumnView, RowSpan
from dataplane.errors import FieldUnknown, ValueCorrupt
from dataplane.wire import objects
from dataplane.wire.layouts import ColumnSpec
from tests.client.test_chunk_columns import columns, laid_out
from tests.same import same


@st.composite
def views(draw: st.DrawFn) -> tuple[ColumnView, list[Any]]:
    """A view of several chunks, and what its rows are; None: the row lacks the field."""
    runs, expected = list[RowSpan](), list[Any]()
    for _ in range(draw(st.integers(0, 4))):
        rows = draw(st.integers(1, 5))
        first = draw(st.integers(0, rows - 1))
        last = draw(st.integers(first + 1, rows))
        if not draw(st.integers(0, 5)):
            runs.append((None, first, last))
            expected += [None] * (last - first)
            continue
        spec, values = draw(columns(rows).filter(lambda made: made[0].kind in ("array", "bytes")))
        column = ChunkForm((spec,), rows).columns(laid_out([spec], [values]))[0]
        runs.append((column, first, last))
        expected += values[first:last]
    return ColumnView("x", runs), expected


def _check(view: ColumnView, expected: list[Any]) -> None:
    assert len(view) == len(expected)
    assert view.absent.tolist() == [value is None for value in expected]
    for row, value in enumerate(expected):
        assert view.present(row) == (value is not None)
        if value is None:
            with pytest.raises(FieldUnknown):
                view[row]
        else:
            assert same(view[row], value)
    if not any(value is None for value in expected):
        assert all(map(same, view, expected))


@given(st.data())
def test_rows_slices_and_selections(data: st.DataObject) -> None:
    view, expected = data.draw(views())
    _check(view, expected)
    some = data.draw(st.slices(len(expected)))
    _check(view[some], expected[some])
    order = list(data.draw(st.permutations(range(len(expected)))))
    chosen = order[: data.draw(st.integers(0, len(order)))]
    part = view.take(chosen)
    _check(part, [expected[row] for row in chosen])
    again = list(data.draw(st.permutations(range(len(chosen)))))
    _check(part.take(again), [expected[chosen[row]] for row in again])


@given(st.data())
def test_what_rows_have_in_common(data: st.DataObject) -> None:
    view, expected = data.draw(views())
    arrays = [value for value in expected if isinstance(value, np.ndarray)]
    assert view.holds_arrays == (len(arrays) == len(expected) > 0)
    if not view.holds_arrays:
        assert view.uniform is None
        return
    forms = [(value.dtype, value.shape) for value in arrays]
    assert view.forms() == forms
    assert view.uniform == (forms[0] if len(set(forms)) == 1 else None)
    assert set(view.dtypes) == {value.dtype for value in arrays}
    raw = b"".join([value.tobytes() for value in arrays])
    packed = np.empty(view.nbytes, np.uint8)
    view.pack(packed)
    assert packed.tobytes() == raw
    dense = view.dense()
    if dense is not None:
        assert same(np.array(dense), np.stack(arrays))
    ragged = view.ragged
    if ragged is not None:
        shapes = [(*ragged.head, length, *ragged.tail) for length in ragged.lengths]
        assert shapes == [value.shape for value in arrays]


def test_a_text_may_have_any_character() -> None:
    texts = ["", "a\0b", "\ud800", "漢字"]
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    column = ChunkForm((ColumnSpec("text"),), 4).columns(laid_out([ColumnSpec("text")], [raw]))[0]
    assert list(ColumnView("x", [(column, 0, 4)])) == texts


def test_a_view_with_a_value_that_cannot_be_decoded_has_a_representation() -> None:
    spec = ColumnSpec("object")
    rows = [objects.encode_many([None])[0], b"\xff" * 8]  # type: ignore[index]
    column = ChunkForm((spec,), 2).columns(laid_out([spec], [rows]))[0]
    view = ColumnView("x", [(column, 0, 2)])
    assert view[0] is None
    with pytest.raises(ValueCorrupt):
        view[1]
    assert repr(view).startswith(
        "<x: 2 rows, unreadable: field 'x': the value of row 1 is corrupt: the object is "
    )


def test_a_wrong_index_is_the_error_of_a_sequence_and_names_the_field() -> None:
    spec = ColumnSpec("bytes")
    (column,) = ChunkForm((spec,), 3).columns(laid_out([spec], [[b"a", b"b", b"c"]]))
    view = ColumnView("x", [(column, 0, 3)])
    with pytest.raises(IndexError, match="field 'x': row 3 is out of range, .* there are 3 rows"):
        view[3]
    with pytest.raises(TypeError, match=r"field 'x': the index is \[0, 1\]: expected an int or a"):
        view[[0, 1]]  # type: ignore[call-overload]
