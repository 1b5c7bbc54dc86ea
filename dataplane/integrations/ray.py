"""Run one peer on every host of a Ray cluster for as long as the job runs.

Call `start()` in the driver, or `started()` in an actor. On each node a small actor starts the
node's peer and is its client. The peer is not a child of a worker, so it outlives all workers. When
the job ends, for whatever reason, Ray kills the actors, and peers without clients shut down. No row
passes through Ray.

    with dataplane.integrations.ray.start(arena="64GiB"):
        ...  # actors and tasks: dataplane.connect()
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dataplane
from dataplane.errors import AddressInUse, ConnectError, DataplaneError, InvalidConfig, counted
from dataplane.launch import discovery, embedded, ending, rundir, runs, settings
from dataplane.launch.settings import PeerConfig
from dataplane.launch.token import new_token
from dataplane.launch.values import is_loopback

__all__ = ["Peers", "Started", "start", "started"]

log = logging.getLogger(__name__)

START_S = 180.0
"""Seconds to wait for all peers. Ray first starts a worker on every node, which imports this
package."""
STOP_S = 30.0
_PORTS = 1_000


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all peers of a plane share.

    - `given`: the settings that the caller passed to `start`.
    - `variables`: the driver's environment variables. A variable that is set for a node's workers
      takes precedence.
    - `token`: the cluster token. None if every host has it in a file, or if no token is needed.
    """

    plane: str
    seeds: tuple[str, ...]
    given: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    token: str | None = field(default=None, repr=False)

    @property
    def has_token_file(self) -> bool:
        return "token-file" in self.given or "DATAPLANE_TOKEN_FILE" in self.variables


def start(*, timeout: float = START_S, **given: str | bool | None) -> Peers:
    """Start a peer on every live node of the Ray cluster that this driver is connected to.

    - `given`: peer settings by name, with the values that `dataplane peer` takes
      (docs/settings.md): `arena="64GiB", transport="required:nixl"`. Other settings come from the
      environment variables of each node's workers, then from those of this process.
    - `token_file`: path of the cluster token file on every host. Without it, `start` creates a new
      token and sends it to the hosts through Ray.
    - `timeout`: seconds to wait for all peers.

    Workers attach to their node's peer with `dataplane.connect()`. Raises ConnectError if a node
    does not start its peer in time, and InvalidConfig for an invalid setting.
    """
    if not ray.is_initialized():
        raise InvalidConfig("Ray is not initialised: call ray.init() before start()")
    texts = {name: text for name, text in map(_setting, given, given.values()) if text is not None}
    for name in _SHARED:  # raise an unreadable setting here, not on every node
        settings.value(name, settings.by_hand({name: texts.get(name)}, "{}="))
    shared = [settings.SETTINGS[name].env for name in (*_SHARED, *_OF_NODES)]
    variables = {name: os.environ[name] for name in shared if os.environ.get(name)}
    peers = Peers(Setup(runs.find_run().name, (), texts, variables), timeout)
    try:
        peers.extend()
    except BaseException:
        peers.stop()
        raise
    return peers


def started(*, timeout: float = START_S) -> Started:
    """Return the peers of this Ray job. The first process that calls this function starts them with
    `start`, so the processes need no coordination. The peers stop when that process exits, or
    when any process calls `stop()`. Raises the same errors as `start`."""
    options = {"name": f"dataplane-{runs.find_run().name}", "get_if_exists": True, "num_cpus": 0}
    found = Started(ray.remote(_Starter).options(**options).remote())
    _answers([found.starter.start.remote()], timeout)
    return found


@dataclass(frozen=True, slots=True)
class Started:
    """The peers of a Ray job, started by one of its processes. Keep a reference to this object:
    Ray kills the actor that started the peers when the last reference is gone."""

    starter: Any

    def stop(self) -> None:
        """Stop all peers now. Their rows are lost."""
        _let_go([self.starter])


class _Starter:
    """The actor that starts a job's peers, once."""

    def __init__(self) -> None:
        self._peers: Peers | None = None

    def start(self) -> None:
        if self._peers is None:
            self._peers = start()

    def stop(self) -> None:
        if self._peers is not None:
            self._peers.stop()


_SHARED = (
    "arena",
    "device-arena",
    "transport",
    "bulk-tls",
    "metrics",
    "roster",
    "linger",
    "linger-unread",
)
_OF_NODES = ("spill", "token-file")
"""Settings whose values depend on the node."""


def _setting(name: str, text: str | bool | None) -> tuple[str, str | None]:
    """Return the name and text of a setting of `start`. Raise InvalidConfig if peers cannot share
    it."""
    setting = name.replace("_", "-")
    if setting not in (*_SHARED, *_OF_NODES):
        known = ", ".join(one.replace("-", "_") for one in (*_SHARED, *_OF_NODES))
        raise InvalidConfig(f"{name}= is not a setting of start(): use {known} or timeout")
    if isinstance(text, bool):
        text = "1" if text else "0"
    return setting, text


class Peers:
    """The peers of a Ray job. Used as a context manager, `Peers` calls `stop` on exit."""

    def __init__(self, setup: Setup, timeout: float) -> None:
        self._setup = setup
        self._timeout = timeout
        self._attendants: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Peers of plane {self.plane!r} on {len(self._attendants)} Ray nodes>"

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def plane(self) -> str:
        """The plane's name. Set DATAPLANE_RUN to this name for processes that Ray did not start,
        such as child processes of an actor."""
        return self._setup.plane

    @property
    def nodes(self) -> list[str]:
        """Ids of the Ray nodes that have a peer."""
        return list(self._attendants)

    def extend(self) -> None:
        """Start a peer on every node without one, for example after nodes joined the cluster."""
        found = [node for node in _nodes() if node not in self._attendants]
        made = {node: _attendant(node, self.plane) for node in found}
        self._attendants |= made
        try:
            self._raise(list(made.values()))
        except BaseException:
            _let_go([self._attendants.pop(node) for node in made])
            raise
        log.info("run %r: started %s", self.plane, counted(len(made), "peer"))

    def stop(self) -> None:
        """Stop all peers. Their rows are lost. Nodes that have left the Ray cluster are skipped."""
        attendants = list(self._attendants.values())
        self._attendants.clear()
        if ray.is_initialized():  # else the job has ended, and its peers too
            _let_go(attendants)

    def _raise(self, attendants: Sequence[Any]) -> None:
        calls = [
            one.address.remote(self.plane, n, len(attendants)) for n, one in enumerate(attendants)
        ]
        addresses = _answers(calls, self._timeout)
        joins = bool(self._setup.seeds)
        if not joins and len(self._attendants) > len(attendants):
            raise InvalidConfig(
                "other hosts cannot reach the peer of this run, because the Ray cluster had only "
                "one host when start() was called: call stop(), then start() again"
            )
        if not joins and len(addresses) > 1:
            self._setup = _with_seeds(self._setup, addresses)
        pairs = zip(attendants, addresses, strict=True)
        _answers([a.serve.remote(self._setup, where, joins) for a, where in pairs], self._timeout)


def _nodes() -> list[str]:
    """Ids of the living nodes, the head first, so that its peer keeps the roster."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    return [node["NodeID"] for node in alive]


def _attendant(node: str, plane: str) -> Any:
    pinned = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": pinned}
    return ray.remote(Attendant).options(**options).remote(plane)


def _answers(calls: list[Any], timeout: float) -> list[Any]:
    """Return all results. Raise an actor's own error, or ConnectError if one takes too long."""
    try:
        return list(ray.get(calls, timeout=timeout))
    except ray.exceptions.RayTaskError as exc:
        raise exc.cause from exc
    except ray.exceptions.RayError as exc:
        raise ConnectError(
            f"some Ray nodes did not start a peer within {timeout:g} s ({type(exc).__name__}): "
            "check that dataplane is installed on all nodes, and that the nodes can connect to "
            "each other"
        ) from exc


def _let_go(attendants: list[Any]) -> None:
    if attendants:
        told = [one.stop.remote() for one in attendants]
        done, _ = ray.wait(told, num_returns=len(told), timeout=STOP_S)
        if len(done) < len(told):
            late = counted(len(told) - len(done), "actor")
            log.warning("ray: killing %s, because peers did not stop within %g s", late, STOP_S)
    for attendant in attendants:
        ray.kill(attendant)


def _with_seeds(setup: Setup, seeds: Sequence[str]) -> Setup:
    """Make the first peers the seeds. On loopback they need no token."""
    hosts = [seed.removeprefix("tcp://").rpartition(":")[0] for seed in seeds]
    alone = all(is_loopback(host) for host in hosts)
    token = None if alone or setup.has_token_file else new_token()
    return replace(setup, seeds=tuple(seeds), token=token)


class Attendant:
    """The actor of one node. It starts the node's peer, and stays connected to it as a client
    until the job ends. If the actor's worker process dies, the restarted actor finds the
    peer running."""

    def __init__(self, plane: str) -> None:
        self._run = plane
        self._name = str(discovery.node_peer())
        self._plane: dataplane.Plane | None = None
        if self._living() is not None:
            with contextlib.suppress(DataplaneError):  # it may be shutting down
                self._plane = dataplane.connect(self._name, run=plane)

    def address(self, plane: str, number: int, of: int) -> str:
        """Return the address at which this node's peer will listen. Peers on the same
        machine get different ports."""
        here = runs.find_run().name
        if here != plane:
            raise InvalidConfig(
                f"the workers of Ray node {self._name} belong to run {here!r}, but the driver "
                f"belongs to run {plane!r}: in the driver, call connect() after ray.init(), or set "
                "DATAPLANE_RUN and pass the same value to the workers with "
                'ray.init(runtime_env={"env_vars": {"DATAPLANE_RUN": …}})'
            )
        host = ray.util.get_node_ip_address()
        first = discovery.seed_port(plane)
        return f"tcp://{host}:{_free_port(host, range(first + number, first + _PORTS, of))}"

    def serve(self, setup: Setup, listen: str, joins: bool) -> None:
        """Start the peer and become its client."""
        if self._living() is None:
            with _token_file(setup, self._folder() / f".{self._name}.token") as token_file:
                config = self._config(setup, listen, joins, token_file)
                embedded.start(config, START_S)
        self._plane = dataplane.connect(self._name, run=setup.plane)

    def stop(self) -> None:
        """Stop the peer."""
        peer, plane, self._plane = self._living(), self._plane, None
        try:
            if plane is not None:
                plane.close()
        finally:
            if peer is not None:
                ending.end(peer, f"peers.stop() of dataplane.integrations.ray (pid {os.getpid()})")

    def _folder(self) -> Path:
        """Return the folder of the run, and create it if missing. The last peer removes it."""
        return rundir.plane_dir(self._run)

    def _living(self) -> rundir.LivingPeer | None:
        living = rundir.living_peers(self._folder())
        return next((peer for peer in living if peer.name == self._name), None)

    def _config(
        self, setup: Setup, listen: str, joins: bool, token_file: Path | None
    ) -> PeerConfig:
        own = {"run": setup.plane, "name": self._name, "seeds": ",".join(setup.seeds) or "none"}
        own |= {"listen": listen, "join": "1" if joins else "0"} if setup.seeds else {}
        own |= {"token-file": str(token_file)} if token_file else {}
        given = settings.by_hand({**setup.given, **own}, "{}=")
        return embedded.peer_config(given, {**setup.variables, **os.environ}, runs.this_process())


@contextlib.contextmanager
def _token_file(setup: Setup, path: Path) -> Iterator[Path | None]:
    """Yield the token file that the peer reads at its start. Remove one that was created here."""
    if setup.token is None:
        yield None
        return
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    try:
        path.write_text(setup.token)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _free_port(host: str, ports: Sequence[int]) -> int:
    for port in ports:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise AddressInUse(
        f"no free port on {host} between {ports[0]} and {ports[-1]}: free one of these ports, or "
        "choose another run name, which selects other ports"
    )
