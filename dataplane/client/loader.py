"""A loader: a stage's batches for a training loop, of which the next is claimed while one trains.

Runs in the client, with a thread for each loop. The rule is that of streams: a batch is acked when
the loop asks for the next one; whatever else ends the loop releases it, and what was prefetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from dataplane.client import arguments
from dataplane.client.batch import Batch, Run
from dataplane.client.core import DEFAULT_TIMEOUT_S, Handle, Operation
from dataplane.client.lease import Demand, claim
from dataplane.errors import InvalidCall, StreamEnd
from dataplane.wire.messages import Claimed
from dataplane.wire.tables import Name

STATE_VERSION = 1


class Loader:
    """Iterate over it, in the training process itself. A thread claims the next batch, and makes of
    it what `collate` does, while the body works on this one.

    A batch is acked when the loop asks for the next one, with what was added to it; `break`, an
    exception or the end of a `with` releases it. `batch` is the one in hand. `state_dict()` says
    what was given out, so that a loader of a restored plane goes on exactly behind it. InvalidCall
    inside a DataLoader's worker.
    """

    def __init__(
        self,
        run: Run,
        handle: Handle,
        stage: str,
        demand: Demand,
        collate: Callable[[Batch], Any] | None,
        prefetch: int,
        batches: int | None,
        **how: Any,
    ) -> None:
        _refuse_workers()
        demand.want("rows")  # to be told here what is wrong with it, not in the loop
        self.stage = stage
        self._collate = collate
        self._ahead = arguments.count(prefetch, "prefetch")
        self._batches = None if batches is None else arguments.count(batches, "batches")
        self._run, self._handle = run, handle
        self._claim: Callable[[], Operation[Claimed]] = lambda: claim(handle, stage, demand, **how)
        self._given = 0
        self._done: set[Name] = set()
        self._latest: weakref.ref[Loop] | None = None  # which a `break` ends: nobody holds it then

    def __iter__(self) -> Loop:
        _refuse_workers()
        self.close()
        loop = Loop(self)
        self._latest = weakref.ref(loop)
        return loop

    @property
    def _loop(self) -> Loop | None:
        return None if self._latest is None else self._latest()

    @property
    def batch(self) -> Batch | None:
        """The batch that the loop has in hand."""
        loop = self._loop
        return None if loop is None else loop.batch

    def state_dict(self) -> dict[str, Any]:
        """What was given out so far, to be kept with the model and `plane.checkpoint`: the batch in
        hand counts as done, what is only prefetched does not. Plain numbers, texts and lists."""
        batch = self.batch
        held = batch.keys if batch is not None and batch.state == "leased" else []
        return {
            "version": STATE_VERSION,
            "partition": self._handle.name,
            "stage": self.stage,
            "batches": self._given,
            "done": [*held, *self._done.difference(held)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind what `state_dict` said: its rows are acked when they come, and not given
        out. InvalidCall for a state of another partition or stage."""
        wanted = (STATE_VERSION, self._handle.name, self.stage)
        given = tuple(state.get(name) for name in ("version", "partition", "stage"))
        if given != wanted:
            raise InvalidCall(
                f"a state of (version, partition, stage) {given} is none of this loader, {wanted}"
            )
        loop = self._loop
        if loop is not None and not loop.over:
            raise InvalidCall("load_state_dict is for a loader whose loop has not begun")
        self._given, self._done = state["batches"], set(state["done"])

    def close(self) -> None:
        """Release the batch in hand and what was prefetched; the loop is over."""
        loop = self._loop
        if loop is not None:
            loop.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidCall(_WHY)

    def __repr__(self) -> str:
        held = "no batch in hand" if self.batch is None else repr(self.batch)
        return f"<Loader of {self._handle.name!r} for {self.stage!r}: {held}>"


class Loop(Iterator[Any]):
    """One loop over a loader."""

    def __init__(self, loader: Loader) -> None:
        self.batch: Batch | None = None
        self.over = False
        self._loader = loader
        left = None if loader._batches is None else loader._batches - loader._given
        self._thread = Prefetch(loader, left)

    def __next__(self) -> Any:
        batch, self.batch = self.batch, None
        if batch is not None and batch.state == "leased":
            try:
                batch.ack()
            except BaseException:
                self.batch = batch
                raise
        if self.over:
            raise StopIteration
        try:
            self.batch, made = self._thread.next()
        except StreamEnd:
            self.over = True
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        self._loader._given += 1
        return made

    def close(self) -> None:
        """Release what is in hand and what was prefetched. The thread has ended when it returns."""
        self.over = True
        batch, self.batch = self.batch, None
        self._thread.stop()
        self._thread.join()
        held = [one for one, _ in self._thread.left()]
        for one in [*held, *([] if batch is None else [batch])]:
            if one.state == "leased":
                self._loader._run(one.lease.give_back(DEFAULT_TIMEOUT_S))

    def __del__(self) -> None:
        # Left by break, return or an exception: nothing may be waited for in here.
        thread = getattr(self, "_thread", None)
        if thread is None:
            return
        thread.stop()
        held = [batch for batch, _ in thread.left()]
        for batch in [*held, *([] if self.batch is None else [self.batch])]:
            batch.lease.abandon()


class Prefetch:
    """The thread of a loop: claims up to so many batches that nobody has asked for yet."""

    def __init__(self, loader: Loader, left: int | None) -> None:
        self._run, self._handle, self._claim = loader._run, loader._handle, loader._claim
        self._stage, self._collate = loader.stage, loader._collate
        self._ahead, self._left, self._done = loader._ahead, left, loader._done
        self._changed = threading.Condition()
        self._ready: deque[tuple[Batch, Any]] = deque()
        self._failure: BaseException | None = None
        self._stopped = False
        self._cancel: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._work, name="dataplane-loader", daemon=True)
        self._thread.start()

    # the loop's side

    def next(self) -> tuple[Batch, Any]:
        """The next batch and what was made of it. Raises what the thread ended with."""
        with self._changed:
            while not self._ready and self._failure is None:
                self._changed.wait()
            if not self._ready:
                failure, self._failure = self._failure, StreamEnd("this loop is over")
                assert failure is not None
                raise failure
            taken = self._ready.popleft()
            self._changed.notify_all()
            return taken

    def stop(self) -> None:
        """A claim that waits is taken back."""
        self._stopped = True
        self._cancel()
        if self._changed.acquire(blocking=False):  # else the thread holds it, and looks again
            self._changed.notify_all()
            self._changed.release()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    def left(self) -> list[tuple[Batch, Any]]:
        """What was prefetched and is taken by nobody."""
        left, self._ready = list(self._ready), deque()
        return left

    # the thread's side

    def _work(self) -> None:
        failure: BaseException = StreamEnd("this loop is over")
        try:
            with asyncio.Runner() as runner:
                while self._has_room():
                    made = self._made(runner)
                    if made is None:
                        break
                    with self._changed:
                        if not self._stopped:
                            self._ready.append(made)
                        self._changed.notify_all()
                    del made
        except BaseException as exc:  # whatever it is, the loop is where it is told
            failure = exc
        with self._changed:
            self._failure = failure
            if self._stopped:
                self._failure = StreamEnd("this loop is over")
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until a batch may be claimed; False where none is wanted any more."""
        with self._changed:
            while not self._stopped and len(self._ready) >= self._ahead:
                self._changed.wait(1.0)
            if self._stopped or self._left == 0:
                return False
            if self._left is not None:
                self._left -= 1
            return True

    def _made(self, runner: asyncio.Runner) -> tuple[Batch, Any] | None:
        while True:
            try:
                claimed = runner.run(self._claimed())
            except asyncio.CancelledError:
                return None
            batch = self._fresh(Batch(self._run, self._handle, self._stage, claimed))
            if self._stopped:
                return None
            if batch is not None:
                return batch, batch if self._collate is None else self._collate(batch)

    def _fresh(self, batch: Batch) -> Batch | None:
        """Without rows that were done before; those are acked."""
        if not self._done:
            return batch
        done = np.array([key in self._done for key in batch.keys])
        if not done.any():
            return batch
        self._done.difference_update(batch.keys)
        batch.rows(done).ack()
        return None if done.all() else batch.rows(~done)

    async def _claimed(self) -> Claimed:
        from dataplane.client.aio import Runs

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        if self._stopped:
            raise asyncio.CancelledError
        return await Runs(self._handle.session).run(self._claim())


_WHY = (
    "a loader belongs into the training process: in a DataLoader's worker it would lease batches "
    "that nobody can ack when the training loop is done with them, and workers would wait for each "
    "other's rows. Iterate over part.loader(…) itself, without a DataLoader: it prefetches with a "
    "thread, and collate= does there what workers did"
)


def _refuse_workers() -> None:
    """InvalidCall in a worker of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise InvalidCall(_WHY)
