"""`bench perf`: its options, and the hot path and the transports beside their ceilings."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console

from bench import bounds, gpu, machine, outputs, report, transports
from bench.options import names


def register(commands: Any) -> None:
    perf = commands.add_parser("perf", help="the hot path against this machine's ceilings")
    perf.add_argument(
        "--rounds", type=bounds.rounds, default=5, help="medians are taken over these"
    )
    perf.add_argument("--json", type=outputs.output, default=None, help="write the figures here")
    perf.add_argument(
        "--transports",
        type=names(transports.TRANSPORTS),
        default=transports.TRANSPORTS,
        help="pulls over these, each beside its engine's bare loop; default: "
        + ",".join(transports.TRANSPORTS),
    )
    perf.add_argument(
        "--device",
        choices=transports.DEVICES,
        default="cpu",
        help="where the pulled values are; default: cpu",
    )
    perf.add_argument(
        "--only",
        choices=("hot-path", "transports", "gpu"),
        help="default: the first two, and with --device cuda the GPU",
    )
    perf.set_defaults(perform=_perf)


def _perf(options: argparse.Namespace, command: str) -> int:
    """0 also where a transport or a GPU was not run: the report says why."""
    from bench import perf  # imports the library: the other commands run without it

    console = Console()
    began, worked = time.monotonic(), time.process_time()
    told: dict[str, Any] = {}
    if options.only in (None, "hot-path"):
        with report.progress(console, "hot path", "rounds") as bar:
            told |= perf.measure(options.rounds, bar)
    if options.only in (None, "transports"):
        with report.progress(console, "transports", "batches") as bar:
            lanes, taken = transports.measure(
                options.transports, options.device, options.rounds, bar
            )
        told["transports"] = lanes
        told["spread"] = told.get("spread", {}) | perf.spread_of(taken)
    if options.only == "gpu" or (options.only is None and options.device == "cuda"):
        told["gpu"] = _gpu(options.rounds, console)
    told["bench_seconds"] = {  # of all that was measured; processor: of this process alone
        "clock": time.monotonic() - began,
        "processor": time.process_time() - worked,
    }
    told |= {"rounds": options.rounds, "machine": machine.describe(), "command": command}
    if options.json:
        outputs.write_json(options.json, told)
    console.print_json(json.dumps({k: v for k, v in told.items() if k != "spread"}))
    if lanes_told := told.get("transports"):
        console.print(transports.table(lanes_told))
        for reason in transports.reasons(lanes_told):
            console.print(reason, markup=False)
    if gpu_told := told.get("gpu"):
        if gpu_told.get("status") == "not run":
            console.print(f"the GPU was not run: {gpu_told['error']}", markup=False)
        else:
            console.print(gpu.table(gpu_told))
            console.print(gpu.ways.table(gpu_told["ways"]))
    return 0


def _gpu(rounds: int, console: Console) -> dict[str, Any]:
    if why := gpu.missing():
        return {"status": "not run", "error": why}
    from bench.gpu.device import Cuda

    cuda = Cuda()
    with report.progress(console, "GPU", "rounds") as bar:
        told = gpu.measure(cuda, rounds, bar)
    with report.progress(console, "GPU to GPU", "ways") as bar:
        return told | {"ways": gpu.ways.measure(cuda, rounds, bar)}
