"""A range of known bytes, lent to other peers so that they can try the ways from here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LENT_S = 30.0


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sample, see `Sampled`."""
    index = np.arange(nbytes, dtype=np.uint32)
    mixed = index * np.uint32(167) + np.uint32(seed)
    mixed ^= index >> np.uint32(8)
    mixed ^= index >> np.uint32(16)
    return mixed.astype(np.uint8)


class Lent:
    """One range, or none. release: of a range that nobody reads any more."""

    def __init__(self, release: Callable[[npt.NDArray[Any]], object]) -> None:
        self.range: npt.NDArray[Any] | None = None
        self.seed = 0
        self._release = release
        self._readers: set[str] = set()
        self._ends: asyncio.TimerHandle | None = None

    def new_seed(self) -> int:
        self.seed = secrets.randbits(31)
        return self.seed

    def to(self, reader: str) -> None:
        """This peer reads it, for LENT_S at most."""
        self._readers.add(reader)
        if self._ends is not None:
            self._ends.cancel()
        self._ends = asyncio.get_running_loop().call_later(LENT_S, self._take_back)

    def done(self, reader: str) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._take_back()

    def _take_back(self) -> None:
        self._readers.clear()
        self.close()
        lent, self.range = self.range, None
        if lent is not None:
            self._release(lent)

    def close(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
