"""How much of anything a run on one machine may be asked for, and why no more.

Every process of a run holds the whole trace, and the runner a digest of every value, so neither
hosts nor rows may be as many as somebody can type. A cluster's size is the simulator's matter.
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
    """Options that are possible one by one, and not together."""


class TooMuch(Impossible):
    """Together they are more than a run may be."""


def check(prompts: int, steps: int) -> None:
    """Raises TooMuch."""
    if (groups := prompts * steps) > _GROUPS:
        raise TooMuch(
            f"{steps} steps of {prompts} prompts are {groups} groups, over the limit of "
            f"{_GROUPS:,}, because every process of a run holds them all: reduce --steps "
            "or --prompts"
        )
