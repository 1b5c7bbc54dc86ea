"""The grid: each damage at each moment, with its written outcome, on real processes.

Whatever happens to a host, with `replicas=2`: the call that is under way ends within its bound,
done or with a typed error that may be repeated; afterwards, or after the damage has passed, every
row is there as it was put, each stage gets it once, and the plane is whole again. CI plays some
cells, one after the other on the same hosts. `make chaos` plays all, each on its own hosts.
docs/guarantees.md names the cells that other tests prove.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import DataplaneError, Partition
from tests.chaos.hosts import DAMAGES, LOST_AFTER_S, VICTIM, Hosts, X, Y
from tests.end_to_end.conftest import in_sync, until

BOUND_S = 25.0
"""A call's deadline is 20 s, and a client waits 5 s beyond it for its peer."""
CALL_S = 20.0
PASSED_S = 60.0
MOMENTS = ("put", "claim", "pull", "ack", "roster change", "drain", "checkpoint")
ELSEWHERE = {(d, m) for d in ("kill", "stop", "pause") for m in ("put", "claim", "pull", "ack")}
"""In tests/end_to_end/test_chaos_calls.py."""
GRID = [(d, m) for d in DAMAGES for m in MOMENTS if (d, m) not in ELSEWHERE]
IN_CI = [
    ("cut", "put"),
    ("slow", "pull"),
    ("corrupt", "claim"),
    ("descriptors", "ack"),
    ("kill", "drain"),
]
"""After the last one "c" is gone."""
PLAYS = [[cell] for cell in GRID] if os.environ.get("CHAOS") else [IN_CI]
REPEATABLE = (
    dataplane.Unavailable,
    dataplane.PeerLost,
    dataplane.DeadlineExceeded,
    dataplane.ClaimTimeout,
    dataplane.BackPressure,
    dataplane.TransferFailed,
    dataplane.StaleEpoch,
    dataplane.CheckpointFailed,
    dataplane.LeaseExpired,
)
"""What a call may end with while a host is damaged: each says to repeat it, or the claim."""
OUT_OF_MEMORY = (*REPEATABLE, dataplane.InternalError)
"""A peer that gets no memory says so, whatever it was doing."""


@pytest.fixture
def hosts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("DATAPLANE_TOKEN_FILE", "")
    running = Hosts(run_dir, "--lost-after", f"{LOST_AFTER_S:g}")
    try:
        running.start_all(*"abc")
    except PermissionError as exc:
        running.switch.close()
        pytest.skip(str(exc))
    yield running
    running.stop()


def prepare(moment: str, hosts: Hosts, part: Partition, folder: Path) -> Callable[[], object]:
    """The call that the damage hits."""
    match moment:
        case "put":
            return lambda: part.put({"y": [Y]}, key=["k"], timeout=CALL_S)
        case "pull":
            return lambda: part.get(keys=["k"], fields=["x"], timeout=CALL_S)["x"][0].sum()
        case "claim":
            return lambda: part.claim("s", rows=1, timeout=CALL_S).ack()
        case "ack":
            batch = part.claim("s", rows=1, timeout=CALL_S)
            batch.add(y=[Y])
            return batch.ack
        case "roster change":
            return lambda: hosts.launch("d", "--join")
        case "drain":
            hosts.peers[VICTIM].send_signal(signal.SIGTERM)
            return lambda: part.get(keys=["k"], timeout=CALL_S)
        case _:
            return lambda: hosts.planes["b"].checkpoint(folder / "c", timeout=CALL_S)


@pytest.mark.needs("ip")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cells", PLAYS, ids=lambda cells: "-".join(cells[0]).replace(" ", "-"))
def test_every_call_ends_and_every_row_is_there(
    hosts: Hosts, tmp_path: Path, cells: list[tuple[str, str]]
) -> None:
    for damage, moment in cells:
        print(f"{damage} during {moment}")
        play(hosts, tmp_path, damage, moment)


def play(hosts: Hosts, tmp_path: Path, damage: str, moment: str) -> None:
    name = f"{damage} during {moment}"
    part = hosts.planes["b"].partition(name, {"s": ["x"]}, free="drop", replicas=2)
    hosts.planes[VICTIM].partition(name).put({"x": [X]}, key=["k"])
    hosts.planes["a"].partition(name).put({"x": [X + 1]}, key=["l"])
    call = prepare(moment, hosts, part, tmp_path)
    allowed = OUT_OF_MEMORY if damage == "memory" else REPEATABLE
    DAMAGES[damage].act(hosts)
    began = time.monotonic()
    try:
        call()
        done = True
    except allowed:
        done = False
    took_s = time.monotonic() - began
    assert took_s < BOUND_S, f"{name}: the call took {took_s:.1f} s"
    hosts.settle()
    whole_again(hosts, damage, moment)
    for host in "ab":
        rows = hosts.planes[host].partition(name).get(keys=["k", "l"], timeout=CALL_S)
        np.testing.assert_array_equal(rows["x"][0], X)
        np.testing.assert_array_equal(rows["x"][1], X + 1)
    if done and moment in ("put", "ack"):
        kept = [part.get(keys=[key], timeout=CALL_S) for key in ("k", "l")]
        (found,) = [row["y"][0] for row in kept if "y" in row.fields]
        np.testing.assert_array_equal(found, Y)
    if moment == "checkpoint":
        part = whole_or_absent(hosts, tmp_path / "c", done, part)
    once_each(part, done and moment in ("claim", "ack"))


def whole_again(hosts: Hosts, damage: str, moment: str) -> None:
    """The roster has who is alive, and every shard a backup in sync."""
    alive = {*"abcd"} if moment == "roster change" else {*"abc"}
    if damage == "kill" or moment == "drain":
        alive.remove(VICTIM)
        until(lambda: hosts.peers[VICTIM].poll() is not None, "the drained peer ends", PASSED_S)
    members = {hosts.address(name) for name in alive}
    until(lambda: hosts.members() == members, f"{sorted(alive)} are members", PASSED_S)
    in_sync(hosts.planes["a"], PASSED_S)


def once_each(part: Partition, one_done: bool) -> None:
    """Of two rows each comes once; a call that failed may have taken one."""
    part.seal()
    seen: list[object] = []
    with pytest.raises(dataplane.StreamEnd):
        while True:
            with part.claim("s", rows=1, timeout=PASSED_S) as batch:
                seen += batch.keys
    assert len(seen) == len(set(seen)), seen
    assert len(seen) in ((1,) if one_done else (1, 2)), seen


def whole_or_absent(hosts: Hosts, folder: Path, done: bool, part: Partition) -> Partition:
    """What was written is read again; of what failed nothing is there."""
    if not done:
        assert not folder.exists()
        return part
    part.drop()
    try:
        hosts.planes["a"].restore(folder)
    except DataplaneError as exc:
        raise AssertionError(f"a checkpoint that was written cannot be read: {exc}") from exc
    return hosts.planes["b"].partition(part.name)
