"""`python -m bench compare`: its options, and what becomes of the report."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from bench import machine, outputs, report
from bench.options import names, round_count, several, size, up_to, whole
from tests.perf.compare import measure, table
from tests.perf.compare.ends import NAMES


def register(commands: Any) -> None:
    """Add the command to the bench's parser."""
    defaults = measure.Settings()
    sizes = up_to(
        machine.memory_bytes() // 8, "a plane and its clients hold several copies of a batch", size
    )
    singles = up_to(1_000_000, "each row is put and read by itself", whole)
    rows = up_to(65_536, "each row is a separate array in every field")
    hosts = up_to(8, "each is a peer or a Ray node on this machine")
    what = "move one batch through dataplane and other planes, and compare them"
    parser = commands.add_parser("compare", help=what, description=f"{what.capitalize()}.")
    parser.add_argument(
        "--planes",
        type=names(NAMES),
        default=defaults.planes,
        help=f"planes to run (default: {','.join(defaults.planes)})",
    )
    parser.add_argument(
        "--sizes",
        type=several(sizes),
        default=defaults.sizes,
        help="batch sizes (default: 64MiB,512MiB)",
    )
    parser.add_argument(
        "--hosts",
        type=several(hosts),
        default=defaults.hosts,
        help="numbers of hosts (default: 1,2)",
    )
    parser.add_argument(
        "--rows", type=rows, default=defaults.rows, help="rows per batch (default: 256)"
    )
    parser.add_argument(
        "--rounds",
        type=round_count,
        default=defaults.rounds,
        help="rounds, each with new processes (default: 3)",
    )
    parser.add_argument(
        "--repeats",
        type=round_count,
        default=defaults.repeats,
        help="repeats per round (default: 3)",
    )
    parser.add_argument(
        "--singles",
        type=singles,
        default=defaults.singles,
        help="rows to move one by one (default: 100)",
    )
    parser.add_argument("--seed", type=whole, default=0, help="seed of the batch (default: 0)")
    parser.add_argument(
        "--json", type=outputs.output, default=None, help="write the figures to this file"
    )
    parser.set_defaults(perform=_compare)


def _compare(options: argparse.Namespace, command: str) -> int:
    """0 when every plane that is installed did everything, 1 when one did not."""
    console = Console()
    settings = measure.Settings(
        planes=options.planes,
        sizes=options.sizes,
        hosts=options.hosts,
        rows=options.rows,
        rounds=options.rounds,
        repeats=options.repeats,
        singles=options.singles,
        seed=options.seed,
    )
    described = machine.describe()

    def keep(figures: measure.Report) -> None:
        """After each tree: what is known survives a later failure."""
        if options.json:
            told = {**figures, "machine": described, "command": command}
            outputs.write_json(options.json, told)

    with report.progress(console, "compare", "process trees") as bar:
        figures = measure.measure(settings, bar, keep)
    keep(figures)
    table.show(console, figures)
    return 1 if any(plane["status"] == "error" for plane in figures["planes"].values()) else 0
