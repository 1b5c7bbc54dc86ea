"""What wakes the housekeeper: rung from anywhere, also from finalizers, so it takes no lock.

Runs in the client. It wakes once for all that happens until the housekeeper looks: a thread woken
for each batch that dies would fight with the caller's over the interpreter, and find nothing, as
what is due goes with the next call.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Bell:
    """Of one thread that sleeps."""

    __slots__ = ("_rings", "rung")

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()  # its put is reentrant
        self.rung = False
        """and not heard yet"""

    def ring(self) -> None:
        """Something is there to be seen to. Write it down first."""
        if not self.rung:
            self.rung = True
            self._rings.put(None)

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until it rings; False after `timeout_s`."""
        try:
            self._rings.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def heard(self) -> None:
        """It may ring again. To be said before one looks, so that nothing is overlooked."""
        self.rung = False
