"""Types of options for argparse, which refuse invalid values before anything starts.

They also refuse what no machine can hold: every number of things that are kept has a limit
(`up_to`), and the message says which and why. Every process of a run holds the whole trace, and the
runner a digest of every value. `bench sim` models larger clusters.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_DAY_S = 86_400.0
_DIGITS = 18  # of a number, so that it fits 64 bits wherever it is kept
_LEAST, _MOST = 1e-6, 1e9
_MOST_BYTES = 1 << 50
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_GROUPS = 32_768


class Impossible(ValueError):
    """A command cannot work with its arguments: options that contradict each other, or a file."""


def add(
    parser: ArgumentParser, flag: str, parse: Callable[[str], Any], what: str, **more: Any
) -> None:
    """Add an option whose values `parse` converts or refuses. what: its line of help."""
    parser.add_argument(flag, type=parse, help=what, **more)


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """One or several of the known names, separated by commas."""

    def name(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text!r} is not valid: use one of {', '.join(known)}")
        return text

    return several(name)


def count(text: str, least: int = 1) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or (least and not text.strip("0")):
        raise ArgumentTypeError(f"{text!r} is not valid: use a whole number of at least {least}")
    if len(text) > _DIGITS:
        raise ArgumentTypeError(
            f"{text!r} has more than {_DIGITS} digits, the maximum: use a smaller number"
        )
    return int(text)


whole = partial(count, least=0)


def up_to(most: int, why: str, parse: Callable[[str], int] | None = None) -> Callable[[str], int]:
    """As `parse` (or `count`), but at most `most`. why: the reason for the limit."""

    def bounded(text: str) -> int:
        value = (parse or count)(text)
        if value > most:
            raise ArgumentTypeError(
                f"{value} is over the limit of {most:,}, because {why}: use a smaller number"
            )
        return value

    return bounded


def size(text: str) -> int:
    """Bytes: `512MiB`, `1GiB`, or a number."""
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if not match or not match[1].strip("0"):
        raise ArgumentTypeError(f"{text!r} is not a size: use a size such as 512MiB or 1GiB")
    if len(match[1]) > _DIGITS or (nbytes := int(match[1]) * _UNITS[match[2]]) > _MOST_BYTES:
        raise ArgumentTypeError(
            f"{text!r} is over the limit of {_MOST_BYTES >> 30:,}GiB: use a smaller size"
        )
    return nbytes


def _within(least: float, most: float, what: str) -> Callable[[str], float]:

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not valid: use a number") from None
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text!r} is not valid: use {what}")
        return value

    return parse


seconds = _within(_LEAST, _DAY_S, "a number of seconds, such as 60, up to a day")
positive = _within(_LEAST, _MOST, f"a number from {_LEAST:g} to {_MOST:g}")
"""Above 0, within the range that clocks can handle."""


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Several values of one kind, separated by commas."""
    return lambda text: tuple(parse(part) for part in text.split(","))


host_count = up_to(64, "each host is one service and three workers on this machine")
prompt_count = up_to(_GROUPS, "every process of a run holds all groups")
step_count = up_to(_GROUPS, "every process of a run holds the groups of all steps")
step_lead = up_to(
    64, "a controller holds the batch of every step that rollout is ahead of training", whole
)
round_count = up_to(1_000, "the figures of every round are kept until the end")


def check_groups(prompts: int, steps: int) -> None:
    if (groups := prompts * steps) > _GROUPS:
        raise Impossible(
            f"{steps} steps of {prompts} prompts are {groups} groups, over the limit of "
            f"{_GROUPS:,}, because every process of a run holds them all: reduce --steps "
            "or --prompts"
        )
