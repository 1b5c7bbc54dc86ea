"""`python -m tests.simulation [--seeds N] [--first SEED] [--jobs N] [--story]`: run seeds, and tell
which fail."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import subprocess
import sys
import time
import warnings

from tests.simulation.loop import START_S, VirtualLoop
from tests.simulation.run import Outcome, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a range of seeds")
    parser.add_argument("--story", action="store_true", help="tell what happened in each run")
    parser.add_argument("--log", action="store_true", help="show the peers' logs")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have another order with another
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if options.jobs > 1:
        return _in_processes(options.first, options.seeds, options.jobs, options.seconds)
    told = logging.StreamHandler()
    told.addFilter(_place)
    told.setFormatter(logging.Formatter("%(when).2f %(where)s %(name)s %(message)s"))
    told.setLevel(logging.INFO if options.log else logging.CRITICAL)
    # errors are looked at in every run: what a peer calls a bug of its own fails the seed
    logging.basicConfig(level=logging.INFO if options.log else logging.ERROR, handlers=[told])
    warnings.simplefilter("ignore", RuntimeWarning)  # tasks that are cancelled before they began
    began, failed, done, steps, virtual_s = time.monotonic(), 0, 0, 0, 0.0
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() - began > options.seconds:
            break
        outcome = play(seed)
        gc.collect()
        done, steps, virtual_s = done + 1, steps + outcome.steps, virtual_s + outcome.virtual_s
        failed += bool(outcome.violations)
        if options.story or outcome.violations:
            _tell(outcome, options.story)
    took_s = time.monotonic() - began
    print(
        f"{done} seeds, {failed} failed; {steps} steps and {virtual_s:.0f} virtual seconds in "
        f"{took_s:.1f} s"
    )
    return 1 if failed or not done else 0


def _in_processes(first: int, seeds: int, jobs: int, seconds: float) -> int:
    """As many ranges of seeds, each played by a process of its own."""
    share = -(-seeds // jobs)
    command = [sys.executable, "-u", "-m", "tests.simulation", "--seconds", str(seconds)]
    end = first + seeds
    players = [
        subprocess.Popen([*command, "--first", str(at), "--seeds", str(min(share, end - at))])
        for at in range(first, end, share)
    ]
    return max(player.wait() for player in players)


def _place(record: logging.LogRecord) -> bool:
    """At which machine, and when, as the story counts."""
    loop = asyncio._get_running_loop()
    virtual = loop if isinstance(loop, VirtualLoop) else None
    record.when = virtual.now - START_S if virtual else 0.0
    record.where = virtual.current.name if virtual else "-"
    return True


def _tell(outcome: Outcome, story: bool) -> None:
    for line in outcome.story if story else ():
        print(f"    {line}")
    if story:
        print(f"    {outcome.steps} steps, {outcome.virtual_s:.1f} s, trace {outcome.trace:x}")
    for wrong in outcome.violations[:5]:
        print(f"  seed {outcome.seed}: {wrong}")
    if outcome.violations:
        print(f"  again: python -m tests.simulation --first {outcome.seed} --seeds 1 --story")


if __name__ == "__main__":
    sys.exit(main())
