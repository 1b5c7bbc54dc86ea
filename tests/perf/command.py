"""`bench perf`: its options, and the hot path and the transports beside their ceilings."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from bench import machine, outputs, report
from bench.options import names, round_count
from tests.cluster import Failed
from tests.perf import gpu, transports


def register(commands: Any) -> None:
    perf = commands.add_parser(
        "perf", help="compare the hot path and the transports with the limits of this machine"
    )
    perf.add_argument(
        "--rounds",
        type=round_count,
        default=5,
        help="take medians over this many rounds (default: 5)",
    )
    perf.add_argument(
        "--json", type=outputs.output, default=None, help="write the figures to this file"
    )
    perf.add_argument(
        "--transports",
        type=names(transports.TRANSPORTS),
        default=transports.TRANSPORTS,
        help="transports to pull over, each compared with a bare loop of its engine (default: "
        f"{','.join(transports.TRANSPORTS)})",
    )
    perf.add_argument(
        "--only",
        choices=("hot-path", "transports", "gpu"),
        help="measure only this part (default: all parts; the GPU if one is visible)",
    )
    perf.set_defaults(perform=_perf)


def _perf(options: argparse.Namespace, command: str) -> int:
    """0 also where a transport or a GPU was not run: the report says why; 1 where a peer ended."""
    from dataplane.errors import DataplaneError  # the other commands run without the library

    console = Console()
    described = {"rounds": options.rounds, "machine": machine.describe(), "command": command}
    told: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    try:
        for part in _parts(options, console):
            spread |= part.pop("spread", {})
            told |= part
            if options.json:  # after each part: what is known survives a later failure
                outputs.write_json(options.json, told | {"spread": spread} | described)
    except (DataplaneError, Failed) as exc:
        console.print(f"the measurement stopped early: {exc}", markup=False)
        return 1
    finally:  # also where it is stopped, or the disk is full
        if told:
            console.print_json(json.dumps(told | described))
    return 0


def _parts(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """The parts of the report, each as it is known; the last says what all of it took."""
    from tests.perf import hot_path  # imports the library: the other commands run without it

    began, worked = time.monotonic(), time.process_time()
    if options.only in (None, "hot-path"):
        with report.progress(console, "hot path", "rounds") as bar:
            figures = hot_path.measure(options.rounds, bar)
        yield figures
    if options.only in (None, "transports"):
        with report.progress(console, "transports", "batches") as bar:
            lanes, taken = transports.measure(options.transports, options.rounds, bar)
        yield {"transports": lanes, "spread": hot_path.spread_of(taken)}
    missing = gpu.missing() if options.only in (None, "gpu") else "not asked for"
    if options.only == "gpu" and missing:
        yield {"gpu": {"status": "not run", "error": missing}}
    elif not missing:
        yield {"gpu": _gpu(options.rounds, console)}
    yield {
        "bench_seconds": {  # of all that was measured; processor: of this process alone
            "clock": time.monotonic() - began,
            "processor": time.process_time() - worked,
        }
    }


def _gpu(rounds: int, console: Console) -> dict[str, Any]:
    from tests.perf.gpu.device import Cuda

    cuda = Cuda()
    with report.progress(console, "GPU", "rounds") as bar:
        told = gpu.measure(cuda, rounds, bar)
    with report.progress(console, "GPU to GPU", "ways") as bar:
        return told | {"ways": gpu.ways.measure(cuda, rounds, bar)}
