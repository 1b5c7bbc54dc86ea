"""Limits on the size of a run on one machine, with their reasons.

Every process of a run holds the whole trace, and the runner a digest of every value, so the
numbers of hosts and rows are limited. `bench sim` models larger clusters.
"""

from __future__ import annotations

from bench.options import up_to, whole

_GROUPS = 32_768
_ROUNDS = 1_000

hosts = up_to(64, "each host is one service and three workers on this machine")
trainers = up_to(64, "each trainer is a process on this machine")
prompts = up_to(_GROUPS, "every process of a run holds all groups")
steps = up_to(_GROUPS, "every process of a run holds the groups of all steps")
staleness = up_to(
    64, "a controller holds the batch of every step that rollout is ahead of training", whole
)
rounds = up_to(_ROUNDS, "the figures of every round are kept until the end")
frames = up_to(100_000_000, "a peer takes only a few thousand a second")


class Impossible(ValueError):
    """A command cannot work with what it was given: options that contradict each other, a file."""


def check(prompts: int, steps: int) -> None:
    """Raise Impossible if a run of this size exceeds the limits."""
    if (groups := prompts * steps) > _GROUPS:
        raise Impossible(
            f"{steps} steps of {prompts} prompts are {groups} groups, over the limit of "
            f"{_GROUPS:,}, because every process of a run holds them all: reduce --steps "
            "or --prompts"
        )
