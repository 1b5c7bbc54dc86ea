"""What the home of a stage tells its caller to do: plain data, carried out by the peer."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.wire.messages import Want


@dataclass(frozen=True, slots=True)
class ClaimId:
    peer: str
    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """Grant up to `want_remaining` to the claim; `exact`: all of it (or its minimum), which
    completes the claim, or nothing. No more than the claim's peer may pull."""

    claim: ClaimId
    want_remaining: Want
    exact: bool
    credit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Complete:
    """The claim has all it gets. told: by the grant itself."""

    claim: ClaimId
    told: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """No row can come any more, and the claim holds none."""

    claim: ClaimId


@dataclass(frozen=True, slots=True)
class Unmeetable:
    """A budget smaller than any unit that is next in line."""

    claim: ClaimId


@dataclass(frozen=True, slots=True)
class Starved:
    """What is next needs more bytes (beyond those granted) than the claim's peer may pull now: it
    gives back what it holds, and queues again when it may pull that much."""

    claim: ClaimId
    needed_bytes: int


Instruction = Order | Complete | Ended | Unmeetable | Starved
