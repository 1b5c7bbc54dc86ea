"""Replace OpenRLHF's queue between the experience maker and the trainer (docs/openrlhf.md).

    from dataplane.integrations.openrlhf import Queue    # instead of ray.util.queue

`ray.util.queue.Queue` sends every batch through an actor. This queue stores an item on the host
that put it, and moves it directly to the host that gets it. Items are what OpenRLHF puts: a list of
`Experience` with the state of its data loader, None, a str or a tuple.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import sys
import uuid
from typing import Any

import dataplane
from dataplane.integrations.objects import packed_object, unpacked_object

__all__ = ["Empty", "Full", "Queue"]

Empty, Full = queue.Empty, queue.Full
_GET, _ITEM = "get", "item"
_CLASS = "\0class"


class Queue:
    """A queue for any number of processes, threads and hosts.

    First in, first out, over all hosts: items come out in the order in which they arrived at the
    peer that holds the queue's partition. If `put` returned before another `put` began, its item
    comes out first. An item whose consumer died in `get` comes out again, before younger items.

    - `maxsize`: the largest number of items in the queue; 0 for no limit. The arena limits memory
      in either case. With several producers, the queue may exceed `maxsize` by one item per
      producer.
    - `name`: the name of the queue's partition. Queues with the same name share their items.
      Default: a new, unique name.
    - `run`: as for `dataplane.connect`.

    A queue can be pickled, for example as an argument of an actor. The copy refers to the
    same queue.
    """

    def __init__(
        self, maxsize: int = 0, *, name: str | None = None, run: str | None = None
    ) -> None:
        if maxsize < 0:
            raise ValueError(f"maxsize={maxsize}: expected a positive number, or 0 for no limit")
        self.maxsize = maxsize
        self.name = name or f"queue-{uuid.uuid4().hex[:12]}"
        self._plane = dataplane.connect(run=run)
        self._part = self._plane.partition(self.name, stages={_GET: [_ITEM]})

    def __reduce__(self) -> Any:
        return _attached, (self.maxsize, self.name, self._plane.name)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item. Wait while the queue is full, and raise `Full` after `timeout` seconds.

        Identical arrays within an item, such as the `mm_train_inputs` of one prompt's samples,
        are stored once. Raises InvalidValue, and stores nothing, if the item contains anything
        other than None, numbers, text, bytes, lists, tuples, dicts, arrays, tensors and
        dataclasses.
        """
        packed = packed_object(item, _packed)
        if self.maxsize:
            try:
                self._part.wait(_GET, below=self.maxsize, timeout=timeout if block else 0)
            except TimeoutError:
                raise Full(
                    f"queue {self.name!r} is full: it already holds {self.maxsize} items"
                ) from None
        self._part.put({_ITEM: [{_ITEM: packed}]}, dedup=[_ITEM])

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the next item. Wait while the queue is empty, and raise `Empty` after
        `timeout` seconds. Tensors are private copies. Raises TypeError for a dataclass whose
        module this process has not imported."""
        try:
            within_s = timeout if block else 0
            batch = self._part.claim(_GET, rows=1, in_order=True, timeout=within_s)
        except TimeoutError:
            raise Empty(f"queue {self.name!r} is empty") from None
        with batch:
            return unpacked_object(batch[_ITEM][0][_ITEM], _unpacked)

    def put_nowait(self, item: Any) -> None:
        """Add an item without waiting. Raises `Full` if the queue is full."""
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """Remove and return the next item without waiting. Raises `Empty` if there is none."""
        return self.get(block=False)

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item without blocking the event loop. See `put`."""
        await asyncio.to_thread(self.put, item, block, timeout)

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the next item without blocking the event loop. See `get`."""
        return await asyncio.to_thread(self.get, block, timeout)

    def qsize(self) -> int:
        """Return the number of items in the queue."""
        return int(self._part.stats()["stages"][_GET]["ready_rows"])

    def __len__(self) -> int:
        return self.qsize()

    def empty(self) -> bool:
        """Return whether the queue has no items."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether the queue has `maxsize` items or more."""
        return 0 < self.maxsize <= self.qsize()

    def shutdown(self) -> None:
        """Shut down the queue and free its items. Calls waiting for an item raise
        PartitionGone."""
        self._part.drop()

    def close(self) -> None:
        """Disconnect this process. Other processes can still use the queue."""
        self._plane.close()


def _attached(maxsize: int, name: str, run: str) -> Queue:
    return Queue(maxsize, name=name, run=run)


def _packed(value: Any) -> Any:
    """Convert a dataclass to a dict with its class name. Return any other value unchanged."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    kind = type(value)
    names = [one.name for one in dataclasses.fields(value)]
    fields = {name: packed_object(getattr(value, name), _packed) for name in names}
    return {_CLASS: [kind.__module__, kind.__qualname__], "fields": fields}


def _unpacked(value: dict[str, Any]) -> Any:
    return _imported(*value[_CLASS])(**value["fields"]) if _CLASS in value else value


def _imported(module: str, qualname: str) -> Any:
    """Return a class by name. Raise TypeError unless it is a dataclass of an imported module: an
    item from another process must never load code."""
    kind: Any = sys.modules.get(module)
    if kind is None:
        raise TypeError(
            f"cannot rebuild an item of class {module}.{qualname}, because this process has not "
            f"imported {module}: import it before calling get()"
        )
    for name in qualname.split("."):
        kind = getattr(kind, name, None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(
            f"cannot rebuild an item of class {module}.{qualname}, because this process's module "
            f"{module} has no dataclass of that name: define it at module level, and use the same "
            "definition in all processes"
        )
    return kind
