"""The table of one or two hosts in docs/performance.md, from reports of `perf` and `compare`."""

from __future__ import annotations

from typing import Any

from bench.options import Impossible

Report = dict[str, Any]
KINDS = ("perf", "compare")
_SHOWN = {
    "perf": ("put", "pull", "shard", "cycle", "backed_up", "group_life"),
    "compare": ("ratios", "results"),
}
"""What the table takes from each report."""
_OTHERS = {"transfer_queue": "TransferQueue's rate", "ray-store": "that of Ray's store"}


def trimmed(kind: str, told: Report) -> Report:
    """A report without what the table does not show. Raises Impossible if it lacks a part."""
    wanted = (*_SHOWN[kind], "machine", "command")
    if lacking := [name for name in wanted if name not in told]:
        raise Impossible(
            f"the report of `{kind}` has no {lacking[0]!r}: run `python -m bench {kind}` whole"
        )
    kept = {name: told[name] for name in wanted}
    if kind == "compare":
        shown = {"plane": "dataplane", "hosts": 1, "batch": "1 row"}
        kept["results"] = [line for line in kept["results"] if shown.items() <= line.items()]
    return kept


def made(perf: Report, compare: Report) -> str:
    """Which commands measured the table, and when."""
    return " and ".join(
        f"`{told['command']}` on {told['machine']['date']}, commit {told['machine']['commit']}"
        for told in (perf, compare)
    )


def rows(perf: Report, compare: Report) -> list[tuple[str, str]]:
    """The rows of the table: the measurement, and the result."""
    shard = perf["shard"]
    growth = shard["claim_ms_p50_at_1m"] / shard["claim_ms_p50_at_10k"]
    cycle_ms, backed_up_ms = 1e3 / perf["cycle"]["per_s"], 1e3 / perf["backed_up"]["cycle_per_s"]
    timed = [line for line in compare["results"] if line["operation"] in ("put", "cycle")]
    row_ms = sum(line["seconds"]["median"] * 1e3 for line in timed)

    def beside(which: str) -> str:
        return ", ".join(
            f"{_times(compare['ratios'][f'{which}: of {plane}'])} {rate}"
            for plane, rate in _OTHERS.items()
        )

    return [
        ("put of 256 × 1 MiB", f"{perf['put']['of_memcpy']:.2g} × memcpy's rate"),
        ("pull of the same from another host", f"{perf['pull']['of_socket']:.2g} × a raw socket's"),
        ("claim at 1 million live rows", f"{growth:.2g} × the time at 10 thousand"),
        ("metadata per row", f"{shard['bytes_per_row']:.0f} B"),
        (
            "put, claim and ack of one row",
            f"{cycle_ms:.2f} ms; with a backup {backed_up_ms:.2f} ms",
        ),
        ("groups of 16 rows per processor second of a peer", f"{perf['group_life']['per_s']:,.0f}"),
        (
            "one row of nine short fields, from one process to another",
            f"{row_ms:.2f} ms; {beside('1 row, put+get, 1 host')}",
        ),
        ("512 MiB on one host, put", beside("512 MiB, put, 1 host")),
        ("512 MiB on one host, every byte read", beside("512 MiB, read, 1 host")),
        ("512 MiB across two hosts, every byte read", beside("512 MiB, read, 2 hosts")),
    ]


def _times(ratio: float) -> str:
    """A ratio, in bold if dataplane is slower."""
    return f"{ratio:.2g} ×" if ratio >= 1 else f"**{ratio:.2g} ×**"
