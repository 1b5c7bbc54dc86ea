"""`dataplane record`: record the sizes and times of a job's steps while it runs, for `bench run`.

The directory has one Parquet file for each complete step, with one row per group, and
`recording.json`, which lists the steps. A file gets its name when it is complete. A recorder that
is killed leaves the complete steps, and a `recording.json` that says that it did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet

from dataplane.client._sync.plane import Plane
from dataplane.client.session.opening import visit
from dataplane.errors import (
    ConnectError,
    DeadlineExceeded,
    InvalidCall,
    PeerLost,
    Unavailable,
    counted,
    duration,
    sized,
)
from dataplane.events.follow import SILENT_S, Follower
from dataplane.launch.rundir import Find, LivingPeer, living_runs
from dataplane.timeline.recording import RecordedStep, Recorder

FORMAT = 1
INDEX = "recording.json"
PERIOD_S = 0.5
"""Seconds between two requests for the events of all peers."""
QUIET_S = 30.0
"""After this many seconds without an event, the recorder checks whether it is the last client. If
so, it ends, because the peer stays while it has a client."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Index(msgspec.Struct):
    """The contents of `recording.json`.

    ended: why the recording ended; None while it runs, or if the recorder was killed. lost_events:
    the number of events that were overwritten before the recorder read them. lost_peers: peers that
    the recorder lost before it switched to another one. steps: without their groups.
    """

    format: int
    run: str
    ended: str | None = None
    lost_events: int = 0
    lost_peers: list[str] = []
    left_out: list[str] = []
    hosts: int = 1
    steps: list[RecordedStep] = []


def record(arguments: argparse.Namespace, find: Find) -> int:
    """Record until `--steps` steps are complete, the run ends or a signal arrives. Raise
    InvalidCall if no step was recorded."""
    directory, most_steps = arguments.output, arguments.steps
    if most_steps is not None and most_steps < 1:
        raise InvalidCall(f"--steps {most_steps} is out of range: use a value of at least 1")
    run, peer = find()
    recorder = Recorder()
    with _Stop() as stop:
        with _Access(peer, run) as access:
            folder = _Folder(Path(directory), run)
            print(f"recording run {run} to {directory}; press Ctrl-C to stop", flush=True)
            why = _follow(access, recorder, folder, most_steps, stop)
        folder.add(recorder, recorder.finish(), most_steps)
        folder.end(recorder, why)
        return _summary(recorder, folder, why)


class _Stop:
    """Whether a signal asked the recorder to end. A second signal interrupts it."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Stop:
        self._before = [signal.signal(one, self._note) for one in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(one, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _Access:
    """A client of a peer of this host, or of another peer of the run if that one is lost."""

    def __init__(self, peer: LivingPeer, run: str) -> None:
        self.plane = Plane(visit(peer))
        self._run = run

    def __enter__(self) -> _Access:
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()

    def another(self, alone: bool) -> str:
        """Connect to another peer. Returns why the recording ends if there is none. alone: no other
        peer of the run was ever seen."""
        self.plane.close()
        lost, silent = f"lost peer {self.plane.peer}", ""
        for peer in [one for run in living_runs() if run.name == self._run for one in run.peers]:
            try:
                self.plane = Plane(visit(peer))
            except PeerLost:  # the peer has just ended
                continue
            except (ConnectError, Unavailable) as error:
                silent = f"{lost}, and peer {peer.name} did not answer: {error.message}"
                continue
            return ""
        return silent or (
            "the run ended" if alone else f"{lost}, and no other peer of the run is on this host"
        )


def _follow(
    access: _Access, recorder: Recorder, folder: _Folder, most_steps: int | None, stop: _Stop
) -> str:
    """Ask all peers repeatedly. Return why that ended."""
    follower, answered, peers = Follower(), time.monotonic(), set[str]()
    while True:
        asked, stopped = time.monotonic(), stop.asked
        try:
            look = follower.take(access.plane.events(follower.since(asked)), asked)
            answered = asked
            peers |= {e.peer for e in (*look.events, *look.now)}
            folder.add(recorder, recorder.take(look), most_steps)
            if most_steps is not None and len(folder.index.steps) >= most_steps:
                return f"--steps {most_steps}"
            quiet = recorder.begun and asked - recorder.latest > QUIET_S
            if quiet and not any(e.going_on for e in look.now) and _is_last(access.plane):
                return "no clients left"
        except ConnectError:
            lost = access.plane.peer
            if why := access.another(alone=len(peers) <= 1):
                return why
            folder.lost(lost, access.plane.peer)
            stopped = False  # the new peer has not been asked yet
        except (DeadlineExceeded, Unavailable) as error:
            if not stopped and asked - answered > SILENT_S:
                return f"the peer did not answer: {error.message}"
        if stopped:
            return "stopped"
        if not stop.asked:
            time.sleep(PERIOD_S)


def _is_last(plane: Plane) -> bool:
    """Whether the run has no other client. A peer that does not answer may have some."""
    clients: int = sum(one.get("clients", 1) for one in plane.stats()["peers"].values())
    return clients <= 1


class _Folder:
    """The directory of a recording."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.index = Index(FORMAT, run)
        try:
            self.made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            found = sorted(one.name for one in path.iterdir())
        except OSError as error:
            raise InvalidCall(
                f"cannot use the directory {str(path)!r}: {error.strerror}. Choose "
                "another directory with -o"
            ) from error
        if found:
            raise InvalidCall(
                f"the directory {str(path)!r} is not empty (it contains {found[0]!r}): "
                "choose a new or empty directory with -o"
            )
        self._write_index()

    def add(self, recorder: Recorder, steps: Sequence[RecordedStep], most: int | None) -> None:
        """Write the files of these steps, then the index."""
        for step in steps[: None if most is None else max(0, most - len(self.index.steps))]:
            name = f"step-{step.number:06}.parquet"
            self._write(name, partial(pyarrow.parquet.write_table, _table(step)))
            self.index.steps.append(msgspec.structs.replace(step, groups=[]))
            self.index.hosts = max(self.index.hosts, step.hosts)
            rows, nbytes = (sum(getattr(g, n) for g in step.groups) for n in ("rows", "nbytes"))
            print(
                f"{step.partition}: {counted(len(step.groups), 'group')}, {counted(rows, 'row')}, "
                f"{sized(nbytes)}, {duration(step.ended - step.began)}",
                flush=True,
            )
        if steps:
            self._write_index(recorder)

    def lost(self, peer: str, other: str) -> None:
        """Note in the index that this peer was lost while it was asked."""
        print(f"lost peer {peer}, switched to peer {other}", flush=True)
        if peer not in self.index.lost_peers:
            self.index.lost_peers.append(peer)
        self._write_index()

    def end(self, recorder: Recorder, why: str) -> None:
        """Note in the index that the recording is over."""
        self.index.ended = why
        self._write_index(recorder)

    def discard(self) -> None:
        """Restore the path: nothing was recorded."""
        (self.path / INDEX).unlink(missing_ok=True)
        if self.made:
            self.path.rmdir()

    def _write_index(self, recorder: Recorder | None = None) -> None:
        if recorder is not None:
            self.index.lost_events, self.index.left_out = recorder.lost, recorder.left_out
        told = msgspec.to_builtins(self.index)
        for step in told["steps"]:
            del step["groups"]
        self._write(INDEX, lambda path: path.write_text(json.dumps(told, indent=1) + "\n"))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        unfinished = self.path / f".{name}.part"
        try:
            write(unfinished)
            os.replace(unfinished, self.path / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise InvalidCall(
                f"cannot write {name} to {str(self.path)!r}: {error.strerror or error}. "
                f"{counted(len(self.index.steps), 'step was', 'steps were')} recorded before this "
                "error. Check the disk, or choose another directory with -o"
            ) from error


def _table(step: RecordedStep) -> pyarrow.Table:
    groups = step.groups
    worked = [[{"stage": n, "seconds": s} for n, s in g.stage_s.items()] for g in groups]
    stage = pyarrow.struct([("stage", pyarrow.string()), ("seconds", pyarrow.float64())])
    return pyarrow.table(
        {
            "rows": pyarrow.array([g.rows for g in groups], pyarrow.int64()),
            "nbytes": pyarrow.array([g.nbytes for g in groups], pyarrow.int64()),
            "put_seconds": pyarrow.array([g.put_s for g in groups], pyarrow.float64()),
            "host": pyarrow.array([g.host for g in groups], pyarrow.int64()),
            "trained": pyarrow.array([g.trained for g in groups], pyarrow.bool_()),
            "stages": pyarrow.array(worked, pyarrow.list_(stage)),
        }
    )


def _summary(recorder: Recorder, folder: _Folder, why: str) -> int:
    """Print what was recorded and what was not. Raise InvalidCall if nothing was recorded."""
    steps, lost = len(folder.index.steps), recorder.lost
    out = len(recorder.left_out) + recorder.more_left_out
    for one in recorder.left_out:
        print(f"left out {one}", flush=True)
    if lost:
        many = counted(lost, "event was", "events were")
        print(f"{many} overwritten before the recorder read them", flush=True)
    if not steps:
        folder.discard()
        seen = f"{counted(out, 'step was', 'steps were')} left out" if out else "no step was seen"
        raise InvalidCall(
            f"no complete step was recorded ({why}): {seen}. Record again, and stop only "
            "after all rows of a step are acked and its partition is sealed or dropped"
        )
    print(f"{counted(steps, 'step')} recorded ({why}), {out} left out: {folder.path}", flush=True)
    return 0
