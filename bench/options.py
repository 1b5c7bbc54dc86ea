"""Types of options, for argparse: what is wrong is refused before anything starts."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
_DAY_S = 86_400.0
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """One or several of the known names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A number of at least 0."""
    return 0 if text == "0" else count(text)


def size(text: str) -> int:
    """Bytes: `512MiB`, `1GiB`, or a number."""
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if not match or not int(match[1]):
        raise ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """A time: more than 0, a day at most."""
    value = _number(text)
    if not 0 < value <= _DAY_S:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds such as 60, a day at most")
    return value


def positive(text: str) -> float:
    """More than 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Several values of one kind, separated by commas."""
    return lambda text: tuple(parse(part) for part in text.split(","))


def share(text: str) -> float:
    """A share: at least 0 and less than 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"{text!r} is not a share such as 0.1")
    return value


def speed(text: str) -> float:
    """A speed-up: more than 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a speed-up such as 1 or 20")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
