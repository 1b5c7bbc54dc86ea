"""The interface between the comparison and a plane: what to start, and what a worker does with it.

A contender says which processes its tree needs and where its workers find them; a courier, in the
writer's or the reader's process, puts and gets. What a plane does with its rows after a get (ack,
clear, free) is not timed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from bench.compare.batch import Columns
from bench.machine import version
from bench.planes.base import Service

Array = NDArray[Any]


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One process tree of one contender: how many hosts, where its files are, who started it."""

    hosts: int
    largest: int  # bytes of the largest batch
    folder: str
    parent: int


class Courier(ABC):
    """One worker's end of a plane: the writer only puts, the reader only gets."""

    @abstractmethod
    def load(self, columns: Columns) -> None:
        """Bring a batch into the form that this plane likes best to put. Not timed."""

    @abstractmethod
    def put(self) -> None:
        """Put what was loaded; returns when others can get it."""

    @abstractmethod
    def expect(self, rows: int, puts: int) -> None:
        """The reader hears of so many puts of so many rows, oldest first. Not timed."""

    @abstractmethod
    def get(self) -> Any:
        """The batch: whatever this plane hands out, its columns within reach."""

    @abstractmethod
    def buffers(self, held: Any) -> Iterator[Array]:
        """What was got as contiguous arrays, as large as the plane has them."""

    @abstractmethod
    def rows(self, held: Any) -> Columns:
        """What was got as one array a row and field, for the check. Not timed."""

    @abstractmethod
    def tensordict(self, held: Any) -> Any:
        """What was got as a TensorDict: ragged fields packed and jagged, the others dense."""

    @abstractmethod
    def settle(self, held: Any) -> None:
        """What belongs to the cycle of a single row beside put and get, and is timed with it."""

    @abstractmethod
    def free(self, held: Any) -> None:
        """The reader is done with what it got. Not timed."""

    @abstractmethod
    def forget(self) -> None:
        """The writer lets go of what it put, once it was read. Not timed."""

    @abstractmethod
    def close(self) -> None: ...


class Contender(ABC):
    """The runner's side of a plane, for one process tree."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]  # without which it cannot run
    two_hosts: ClassVar[str]  # what "two hosts" means for it on one machine

    def __init__(self, site: Site) -> None:
        self.site = site

    @abstractmethod
    def services(self) -> list[Service]: ...

    @abstractmethod
    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool: ...

    @abstractmethod
    def address(self, host: int) -> dict[str, Any]: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What was set and differs from, or matters among, the defaults."""

    def environment(self) -> dict[str, str]:
        """Variables for the workers."""
        return {}

    @classmethod
    @abstractmethod
    def courier(cls, role: str, address: dict[str, Any]) -> Courier:
        """Called in a worker's process."""

    @classmethod
    def versions(cls) -> dict[str, str | None]:
        """None: not installed."""
        return {name: version(name) for name in cls.packages}
