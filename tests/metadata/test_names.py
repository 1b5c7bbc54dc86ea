from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRows, LimitExceeded
from dataplane.metadata.tables.keys import (
    format_minted,
    format_minted_many,
    hash_name,
    hash_names,
    mint_many,
)

NAMES = st.text(min_size=1).filter(lambda text: not text.startswith("~")) | st.integers(
    -(1 << 63), (1 << 64) - 1
)


def test_a_str_and_an_int_that_look_alike_are_different_names() -> None:
    assert hash_name("7") != hash_name(7)


@given(st.lists(NAMES, unique_by=lambda name: (type(name), name)))
def test_different_names_have_different_keys_of_16_bytes(many: list[str | int]) -> None:
    try:
        column = hash_names(many)
    except InvalidRows:  # lone surrogates are no text
        return
    assert len(column) == 16 * len(many)
    assert len({column[i : i + 16] for i in range(0, len(column), 16)}) == len(many)


@given(
    session=st.integers(0, (1 << 64) - 1),
    counter=st.integers(0, (1 << 63) - 1),
)
def test_a_minted_key_is_shown_and_read_back(session: int, counter: int) -> None:
    key = mint_many(session, counter, 1)
    assert hash_name(format_minted(key)) == key
    assert mint_many(session, counter, 2)[:16] == key


def test_minted_keys_sort_in_the_order_in_which_they_were_made() -> None:
    column = mint_many(99, 250, 20)
    keys = [column[i : i + 16] for i in range(0, len(column), 16)]
    assert keys == sorted(keys)
    assert keys == [mint_many(99, 250 + i, 1) for i in range(20)]
    assert format_minted_many(column) == [format_minted(key) for key in keys]


@pytest.mark.parametrize("name", ["~mine", "~" + "0" * 31, "~" + "G" * 32])
def test_a_given_name_does_not_start_with_the_mark_of_minted_ones(name: str) -> None:
    with pytest.raises(InvalidRows, match="reserved for generated keys"):
        hash_name(name)


@pytest.mark.parametrize("name", [1.5, None, b"x", True, 1 << 64, "\ud800"])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(InvalidRows):
        hash_name(name)  # type: ignore[arg-type]


def test_a_long_name_is_refused_with_its_size() -> None:
    with pytest.raises(LimitExceeded) as caught:
        hash_name("x" * 513)
    assert caught.value.details == {"size": 513, "limit": 512}
