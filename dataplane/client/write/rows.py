"""The rows, groups and tags of a call, and their columns on the wire. The user gives names (str or
int), or the client generates them. A key has 16 bytes on the wire, and a reader gets the name as it
was given. Pure functions over the arguments of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence, Set
from struct import pack
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.session.session import Session, split_keys
from dataplane.errors import (
    DataplaneError,
    GroupClosed,
    InvalidRows,
    InvalidValue,
    counted,
    few,
    without_group,
)
from dataplane.metadata.tables.keys import (
    format_minted,
    format_minted_many,
    hash_names,
    unencodable,
)
from dataplane.wire.arrays import is_time, items_of, pairs_of, reader, shown, unreadable
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.packed import KEY, U4, column
from dataplane.wire.tables import Name, Rows, Scalar, Table

Index = npt.NDArray[np.intp]
Names = Name | Sequence[Name] | npt.NDArray[Any]
TagValues = Mapping[str, Any]
_SHOWN_GROUPS = 8

_SCALARS = {bool, int, float, str, type(None)}
_NO_COLUMN = (bytes, bytearray, memoryview, Mapping)
"""Types that can be iterated over, although each object is one value."""
_NAMES, _NAMES_OR_NONE = {str, int}, {str, int, type(None)}
_encoder = msgspec.msgpack.Encoder()


def identify(
    session: Session, n: int, key: Names | None, group: Names | Sequence[Name | None] | None
) -> tuple[Rows, list[int] | None]:
    """Return n rows with these keys, or with generated ones, and the group of each row: an index
    into `Rows.group_keys`, or NO_GROUP. None if no row has a group."""
    if key is None:
        rows = Rows(session.mint_keys(n))
    else:
        names = name_list(key, "key")
        _check_length("key", len(names), n)
        rows = Rows(hash_names(names), names)
    if group is None:
        return rows, None
    group = _listed(group, "group")
    if type(group) in _NAMES:
        names, groups = name_list(group, "group"), [0] * n
    else:
        ids: list[Any] = name_list(group, "group", or_none=True)
        _check_length("group", len(ids), n)
        numbers: dict[Name, int] = {}
        groups = [
            NO_GROUP if name is None else numbers.setdefault(name, len(numbers)) for name in ids
        ]
        names = list(numbers)
    rows.group_index = pack(f"<{n}I", *groups)
    rows.group_keys, rows.group_names = hash_names(names), names
    return rows, groups


def take_rows(rows: Rows, index: Index | None) -> Rows:
    """Return the rows at `index`, with only the groups that they are in. None: all rows."""
    if index is None:
        return rows
    keys = np.frombuffer(rows.keys, KEY)[index].tobytes()
    names = None if rows.names is None else [rows.names[i] for i in index.tolist()]
    if not rows.group_index:
        return Rows(keys, names)
    groups = column(rows.group_index, U4)[index].tolist()
    used = sorted({*groups} - {NO_GROUP})
    numbers = {group: number for number, group in enumerate(used)} | {NO_GROUP: NO_GROUP}
    every = group_names(rows)
    return Rows(
        keys,
        names,
        pack(f"<{len(groups)}I", *[numbers[group] for group in groups]),
        np.frombuffer(rows.group_keys, KEY)[used].tobytes(),
        [every[group] for group in used],
    )


def continued_keys(rows: Rows) -> bytes:
    """Return the KEY records that show whether a put continues an earlier one: the keys of its
    groups, else its given keys."""
    return rows.group_keys or (b"" if rows.names is None else rows.keys)


def check_groups(rows: Rows, groups: list[int] | None, group_size: int | None) -> None:
    """Check rows for a partition whose groups have `group_size` rows. groups: see `identify`.

    Raises InvalidRows for a new row without a group, because no claim of whole groups would get
    it, and GroupClosed for a larger group. Only the peer knows whether rows with given keys are
    new, so it checks those.
    """
    if group_size is None:
        return
    alone = rows.count if groups is None else groups.count(NO_GROUP)
    if alone and rows.names is None:
        raise without_group(alone, group_size)
    if groups is None or len(groups) <= group_size:
        return
    counts = Counter(groups)
    del counts[NO_GROUP]
    ((group, most),) = counts.most_common(1) or [(0, 0)]
    if most > group_size:
        name = group_names(rows)[group]
        raise GroupClosed(
            f"nothing was put: group {name!r} has {most} rows in this put, but a group in this "
            f"partition has at most {counted(group_size, 'row')}: use another group id for "
            "the remaining rows",
            groups=[name],
        )


def check_names(rows: Rows) -> None:
    """Raise InvalidRows if a key occurs twice in a put of several messages. The shard finds
    duplicates only within one message."""
    if rows.names is not None and len({*split_keys(rows.keys)}) < len(rows.names):
        twice = Counter(rows.names).most_common(1)[0][0]
        raise InvalidRows(f"key {twice!r} appears twice in this call: give each row its own key")


def _check_length(what: str, given: int, n: int) -> None:
    if given != n:
        noun = "group id" if what == "group" else what
        raise InvalidRows(
            f"got {counted(given, noun)} for {counted(n, 'row')}: pass one {noun} per row"
            + (", or a single one for all rows" if what == "group" else ""),
            given=given,
            rows=n,
        )


@reader(InvalidRows)
def name_list(names: Any, what: str, or_none: bool = False, ordered: bool = True) -> list[Any]:
    """Return one id or several as a list of str and int; None for a row without an id, if allowed.

    ordered: the order matters, so sets are rejected.
    """
    if ordered and isinstance(names, Set) and not isinstance(names, KeysView):
        raise InvalidRows(f"{what}= is a set, which has no order: pass a list with one id per row")
    names = _listed(names, what)
    if isinstance(names, (str, int)):
        found: list[Any] = [names]
    elif isinstance(names, Iterable) and not isinstance(names, _NO_COLUMN):
        listed = items_of(f"{what}=", names, InvalidRows)
        found = [_scalar(name, what, at) for at, name in enumerate(listed)]
    else:
        raise InvalidRows(
            f"{what}={shown(names):.80}: expected one id (a str or an int), or a list with one "
            "id per row"
        )
    wrong = {*map(type, found)} - (_NAMES_OR_NONE if or_none else _NAMES)
    if wrong:
        at = next(i for i, n in enumerate(found) if type(n) in wrong)
        raise InvalidRows(
            f"{what} at index {at} is {shown(found[at]):.80} ({type(found[at]).__name__}): "
            "expected a str or an int. Convert the id, for example with str(id)",
            row=at,
        )
    at, reason = _first_unencodable(found)
    if reason is not None:
        raise InvalidRows(f"{what} at index {at} is {shown(found[at]):.80}, {reason}", row=at)
    return found


def _first_unencodable(values: list[Any]) -> tuple[int, str | None]:
    """Return the index of the first scalar that cannot be encoded, and why."""
    try:
        _encoder.encode(values)
    except (OverflowError, UnicodeEncodeError):
        reasons = enumerate(map(unencodable, values))
        return next((at, reason) for at, reason in reasons if reason is not None)
    return 0, None


def _listed(given: Any, what: str) -> Any:
    """Return an array or a tensor as a list, or a 0-d one as a number. what: names it in errors."""
    if type(given) in (list, str, int):
        return given
    try:
        if not hasattr(given, "tolist"):
            return given
        if is_time(given):
            return list(given) if given.ndim else given
        return given.tolist()
    except Exception as exc:  # of the user's array: a tensor on `meta`, sparse, or quantized
        raise unreadable(what, given, exc, InvalidRows) from exc


def _scalar(value: Any, what: str, at: int) -> Any:
    """Return the entry of a list at index `at` as a plain scalar."""
    if type(value) in _SCALARS:
        return value
    try:
        if getattr(value, "ndim", None) != 0:
            return value
        return value if is_time(value) else value.item()
    except Exception as exc:
        raise unreadable(f"{what} at index {at}", value, exc, InvalidRows, row=at) from exc


def named_rows(names: list[Name]) -> Rows:
    """Return rows with only their keys, as calls address them."""
    return Rows(hash_names(names), names)


def in_parts(names: list[Name], size: int) -> Iterable[list[Name]]:
    """Return parts of at most `size` names."""
    return (names[i : i + size] for i in range(0, len(names), size))


def row_names(rows: Rows) -> list[Name]:
    """Return the keys of these rows as the user knows them."""
    if rows.names is not None:
        return rows.names
    return format_minted_many(rows.keys)


def row_name(rows: Rows, row: int) -> Name:
    """Return the key of one of these rows."""
    if rows.names is not None:
        return rows.names[row]
    return format_minted(rows.keys[row * KEY.itemsize : (row + 1) * KEY.itemsize])


def group_names(rows: Rows) -> list[Name]:
    """Return the ids of the groups in `rows.group_keys`."""
    if rows.group_names is not None:
        return rows.group_names
    return format_minted_many(rows.group_keys)


def row_groups(rows: Rows) -> list[Name | None]:
    """Return the group id of each row."""
    n = rows.count
    if not rows.group_index:
        return [None] * n
    names: list[Name | None] = [*group_names(rows), None]
    return [names[min(i, len(names) - 1)] for i in column(rows.group_index, U4, n).tolist()]


def tag_columns(tags: TagValues | None, n: int) -> dict[str, list[Scalar]]:
    """Return tags as columns: one value for all rows, or one per row. Raise InvalidRows, which
    names the tag, if one is invalid."""
    return {} if tags is None else _tag_columns(tags, n)


@reader(InvalidRows, "tags=")
def _tag_columns(tags: TagValues, n: int) -> dict[str, list[Scalar]]:
    columns: dict[str, list[Scalar]] = {}
    if not isinstance(tags, Mapping):
        raise InvalidRows(
            f"tags={shown(tags):.80}: expected a mapping of tag names to scalars, for example "
            "{'split': 'a'}"
        )
    for name, given in pairs_of("tags=", tags, InvalidRows).items():
        plain = _tag_name(name)
        try:
            columns[plain] = _tag_values(plain, given, n)
        except DataplaneError:
            raise
        except Exception as exc:
            raise unreadable(f"tag {plain!r}", given, exc, InvalidRows, tag=plain) from exc
    return columns


@reader(InvalidRows, "the name of a tag")
def _tag_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidRows(f"invalid tag name {shown(name):.80}: expected a str")
    plain = name if type(name) is str else str.__str__(name)
    if (reason := unencodable(plain)) is not None:
        raise InvalidRows(f"invalid tag name {shown(plain):.80}, {reason}")
    return plain


def _tag_values(name: str, given: Any, n: int) -> list[Scalar]:
    """Return the values of one tag: one for all rows, or one per row."""
    if isinstance(given, Set) and not isinstance(given, KeysView):
        raise InvalidRows(
            f"tag {name!r} is a set, which has no order: pass a list with one value per row",
            tag=name,
        )
    given = _listed(given, f"tag {name!r}")
    if isinstance(given, (str, *_NO_COLUMN)) or not isinstance(given, Iterable):
        given = [given]
    elif len(given := items_of(f"tag {name!r}", given, InvalidRows, tag=name)) != n:
        raise InvalidRows(
            f"tag {name!r} has {counted(len(given), 'value')} for {counted(n, 'row')}: pass "
            "one value per row, or a scalar for all rows",
            tag=name,
        )
    values: list[Scalar] = given
    if not set(map(type, values)) <= _SCALARS:
        values = [_scalar(value, f"tag {name!r}", at) for at, value in enumerate(given)]
        for at, value in enumerate(values):
            if type(value) not in _SCALARS:
                raise InvalidRows(
                    f"tag {name!r} of row {at} is {shown(value):.60} ({type(value).__name__}): "
                    "expected a bool, int, float, str or None; convert the value, or store "
                    "it in a field",
                    tag=name,
                    row=at,
                )
    at, reason = _first_unencodable(values)
    if reason is not None:
        raise InvalidValue(
            f"tag {name!r} of row {at} is {shown(values[at]):.80}, {reason}", tag=name, row=at
        )
    return values


def take_tags(columns: dict[str, list[Scalar]], index: Index | None) -> dict[str, list[Scalar]]:
    """Return the tags of the rows at `index`. A value for all rows stays one value."""
    if index is None:
        return columns
    rows = index.tolist()
    return {
        name: values if len(values) == 1 else [values[i] for i in rows]
        for name, values in columns.items()
    }


def group_positions(table: Table, groups: Names) -> Index:
    """Return the rows of these groups. Raise InvalidRows for a group that is not in the table."""
    wanted = name_list(groups, "group", ordered=False)
    here = {name: at for at, name in enumerate(group_names(table.rows))}
    missing = [name for name in wanted if name not in here]
    if missing:
        known = few([repr(name) for name in here if name is not None], _SHOWN_GROUPS) or "none"
        raise InvalidRows(
            f"group {missing[0]!r} is not in this batch: expected one of the batch's groups "
            f"({known})",
            groups=missing,
        )
    index = column(table.rows.group_index, U4)
    return np.flatnonzero(np.isin(index, [here[name] for name in wanted]))


def tag_values(table: Table, name: str, n: int) -> list[bool | int | float | str | None]:
    """Return one value per row; None for a row without the tag."""
    values = table.tags.get(name, [None])
    return values * n if len(values) == 1 and n != 1 else values
