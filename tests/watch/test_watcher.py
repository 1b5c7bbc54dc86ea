"""The thread that asks the plane: what fails in it, and what others read meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from dataplane.events.merge import Event
from dataplane.launch.rundir import LivingPeer
from dataplane.watch import history, watcher
from dataplane.watch.history import View
from dataplane.watch.picture import Picture, picture
from dataplane.watch.watcher import Watcher
from tests.watch.plane import stats, step


class Told:
    """A plane that tells the same events at each look."""

    events_told = step("step-1", 1_000.0)

    def __init__(self, _: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self, since: float) -> list[Event]:
        return self.events_told

    def stats(self) -> dict[str, Any]:
        return stats(2, "step-1")


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    monkeypatch.setattr(watcher, "EVERY_S", 0.01)
    monkeypatch.setattr(watcher, "BUSY_SHARE", 1.0)
    monkeypatch.setattr(watcher, "visit", lambda peer: peer)
    monkeypatch.setattr(watcher, "Plane", Told)
    return Watcher("run", lambda: LivingPeer("host-0", Path("socket"), None))


def test_a_step_is_read_while_a_look_is_under_way(
    looking: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = looking.look().steps[0].number
    drawing, go_on = threading.Event(), threading.Event()

    def slow(events: Sequence[Event], partition: str, now: float, generation: int) -> Picture:
        drawing.set()
        go_on.wait(20)
        return picture(events, partition, now, generation)

    monkeypatch.setattr(history, "picture", slow)
    monkeypatch.setattr(Told, "events_told", step("step-2", 1_100.0, number=1_000))
    found = list[Picture | None]()
    reader = threading.Thread(target=lambda: found.append(looking.history.picture_of(number)))
    with looking.looking(lambda view: None):
        try:
            assert drawing.wait(20)
            reader.start()
            reader.join(10)
            assert found and found[0] is not None and found[0].partition == "step-1"
        finally:
            go_on.set()
            reader.join(20)


def test_an_unexpected_error_is_shown_and_the_next_look_is_made(
    looking: Watcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = looking.look()
    views, many = list[View](), threading.Semaphore(0)

    def seen(view: View) -> None:
        views.append(view)
        many.release()

    def broken(self: Told, since: float) -> list[Event]:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch, looking.looking(seen):
        patch.setattr(Told, "events", broken)
        while not any("RuntimeError('a bug')" in "".join(one.trouble) for one in views):
            assert many.acquire(timeout=20)
        patch.undo()
        while views[-1].trouble:
            assert many.acquire(timeout=20)
    assert views[-1].sentence == good.sentence
    assert "watcher of run 'run': update failed" in caplog.text and "RuntimeError" in caplog.text


@pytest.mark.parametrize("entry", ["everywhere", "peers"])
def test_a_peer_of_another_release_that_reports_less_is_named_in_one_sentence(
    looking: Watcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    """As by `dataplane status`. What was known before stays on view."""
    good = looking.look()
    less = {name: value for name, value in Told.stats(Told(None)).items() if name != entry}
    with monkeypatch.context() as patch:
        patch.setattr(Told, "stats", lambda self: less)
        patch.setattr(looking, "_stats_due", 0.0)
        views = [looking.look(), looking.look()]
    for view in views:
        (trouble,) = view.trouble
        assert f"a peer's statistics have no entry '{entry}'. Install the same" in trouble
        assert (view.sentence, view.queues, view.hosts) == (good.sentence, good.queues, good.hosts)
    assert not looking.look().trouble and not caplog.text
