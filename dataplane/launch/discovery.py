"""The name of the run and the seeds of its peers, from the variables of launchers.

| launcher | several hosts are seen by | seeds | run |
|---|---|---|---|
| any | – | DATAPLANE_SEEDS (`none`: this host alone) | DATAPLANE_RUN |
| Open MPI | OMPI_COMM_WORLD_SIZE > _LOCAL_SIZE | MASTER_ADDR, others join | PMIX_NAMESPACE |
| Slurm, a step | SLURM_STEP_NUM_NODES > 1 | SLURM_STEP_NODELIST | SLURM_JOB_ID, _STEP_ID |
| Slurm, no step | SLURM_JOB_NUM_NODES > 1 | SLURM_JOB_NODELIST, all het groups | – |
| Kubernetes LeaderWorkerSet | LWS_GROUP_SIZE > 1 | leader and its workers | LWS_LEADER_ADDRESS |
| Ray | the head is elsewhere, or ray knows of several | the head, others join | session, job |
| torchrun | WORLD_SIZE > LOCAL_WORLD_SIZE | MASTER_ADDR, others join | TORCHELASTIC_RUN_ID |
| Kubernetes Indexed Job, JobSet | JOB_COMPLETION_INDEX > 0 | – | host name less its index |

`jobs` checks the launchers from the top. The first one with an id names the run. Seeds come from
the first one that sees several hosts and lists them. If none lists them, SeedsMissing is raised.

An id belongs to one launch. A Slurm job without a step, or a step of one task, such as a shell, has
none, because many programs may start there. A torchrun without `--rdzv-id` has none either. Job ids
of Ray repeat in each session, so the session is a part of the id. Open MPI is checked before Slurm:
mpirun may start ranks through Slurm, and the ranks of its own host then have no step.

"Others join": the launcher names only the first host. A peer must start there. Peers of the other
hosts wait for it, and join from the address that reaches it. On Ray,
`dataplane.integrations.ray.start()` starts one on every host instead.

A pod cannot tell how many pods its Job, JobSet or StatefulSet has. Only a LeaderWorkerSet derives
seeds. The others need DATAPLANE_SEEDS (`tcp://<set>-0.<service>:7101,...`), also in the first pod
of an Indexed Job. The port of a derived seed depends on the run's name and the user, so that two
runs on one host differ.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from dataplane.errors import ConnectError, InvalidConfig, SeedsMissing
from dataplane.launch import settings
from dataplane.launch.values import is_loopback, parse_address

Environ = Mapping[str, str]

MAX_NODES = 65_536
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ephemeral range of Linux


@dataclass(frozen=True, slots=True)
class Job:
    """The variables of one launcher: its name, the launch's id or "", whether the job has several
    hosts, and the seeds' hosts if they can be derived. others_join: the job has hosts besides
    them."""

    launcher: str
    id: str
    several_hosts: bool
    seed_hosts: tuple[str, ...] = ()
    others_join: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this host's peer in its run. listen: None if the peer is neither a seed nor
    joins, or is alone."""

    seeds: tuple[str, ...]
    listen: str | None
    join: bool = False


def launchers_run(environ: Environ = os.environ) -> str | None:
    """Return the name of the run from the first launcher that knows one."""
    job = next((job for job in jobs(environ) if job.id), None)
    return f"{job.launcher}-{job.id}" if job else None


def find_seeds(run: str, environ: Environ = os.environ) -> tuple[str, ...]:
    """Return the addresses of all founding peers in order, or () for this host alone.

    Raises SeedsMissing if the job spans several hosts and no variable names them: otherwise each
    host would have its own run and wait for rows for ever.
    """
    return _seeds(run, environ)[0]


def find_place(run: str, environ: Environ = os.environ) -> Place:
    """Return the seeds, and this host's peer: one of them, or the address where it listens when it
    joins them. Raises SeedsMissing as `find_seeds` does, and ConnectError if the first host cannot
    be resolved here."""
    seeds, others_join = _seeds(run, environ)
    listen = own_seed(seeds)
    if listen is None and others_join:
        host, port = parse_address(seeds[0])
        return Place(seeds, f"tcp://{_bracketed(_address_towards(host))}:{port}", join=True)
    return Place(seeds, listen)


def _seeds(run: str, environ: Environ) -> tuple[tuple[str, ...], bool]:
    """Return the seeds, and whether the job has other hosts."""
    said = settings.settings_in(environ)
    if "seeds" in said:
        return settings.value("seeds", said) or (), False
    several = [job for job in jobs(environ) if job.several_hosts]
    if not several:
        return (), False
    named = next((job for job in several if job.seed_hosts), None)
    if named is None:
        launcher = several[0].launcher
        raise SeedsMissing(
            f"this {launcher} job spans several hosts, but its environment variables do not list "
            "them: set DATAPLANE_SEEDS to the same list on every host, for example "
            "DATAPLANE_SEEDS=tcp://host-a:7101,tcp://host-b:7101. To use only this host, set "
            "DATAPLANE_SEEDS=none",
            launcher=launcher,
        )
    port = seed_port(run)
    seeds = tuple(f"tcp://{_bracketed(host)}:{port}" for host in named.seed_hosts)
    return seeds, named.others_join


def node_peer(environ: Environ = os.environ) -> str | None:
    """Return the name of the peer of this process's Ray node, as `dataplane.integrations.ray` sets
    it."""
    node = environ.get("RAY_NODE_ID") or _of_ray("get_node_id")
    return f"ray-{node[:16]}" if node else None  # the id is in hexadecimal


def seed_port(run: str) -> int:
    """The port of derived seeds, the same on every host of the run."""
    return _FIRST_PORT + xxhash.xxh3_64_intdigest(f"{os.getuid()}-{run}".encode()) % _PORTS


def own_seed(seeds: tuple[str, ...]) -> str | None:
    """The first seed that is an address of this host, where its peer listens."""
    return next((seed for seed in seeds if _is_this_host(parse_address(seed)[0])), None)


def jobs(environ: Environ = os.environ) -> list[Job]:
    """Return the launchers whose variables are set, in the table's order."""
    found = (
        look(environ)
        for look in (_open_mpi, _slurm, _leader_worker_set, _ray, _torchrun, _indexed_job)
    )
    return [job for job in found if job is not None]


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand Slurm's compressed host list: `a[01-03,7],b` is a01 a02 a03 a7 b."""
    nodes: list[str] = []
    for item in re.split(r",(?![^\[]*\])", nodelist):  # at commas outside brackets
        for node in _expand(item.strip()) if item.strip() else ():
            nodes.append(node)
            if len(nodes) > MAX_NODES:
                raise InvalidConfig(
                    f"the Slurm node list {nodelist!r:.80} has over {MAX_NODES} nodes, "
                    "more than the limit: start the job on fewer nodes"
                )
    return tuple(dict.fromkeys(nodes))


def _expand(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, closing, tail = rest.partition("]")
    if not closing:
        raise _not_a_nodelist(item)
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise _not_a_nodelist(item)
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def _not_a_nodelist(item: str) -> InvalidConfig:
    return InvalidConfig(
        f"{item!r:.80} is not a valid Slurm node list: correct SLURM_JOB_NODELIST (in a step, "
        "SLURM_STEP_NODELIST), for example to node[01-03,7]"
    )


def _open_mpi(environ: Environ) -> Job | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    # The host, pid and job of mpirun; in Open MPI 4, a number made from them.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _of_ranks(environ, "openmpi", job, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _of_ranks(environ: Environ, launcher: str, job: str, world: str, local: str) -> Job:
    """Return the job of a launcher. world, local: the variables with the number of ranks, in all
    and on this host."""
    ranks = _integer(environ, world, 1)
    several = ranks > _integer(environ, local, ranks)
    master = environ.get("MASTER_ADDR", "")
    return Job(launcher, job, several, (master,) if master else (), others_join=True)


def _slurm(environ: Environ) -> Job | None:
    # The components of a heterogeneous job have ids of their own; the first one's names them all.
    job = environ.get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID")
    if not job:
        return None
    step = _slurm_step(environ)
    groups = _integer(environ, "SLURM_HET_SIZE", 0)
    of_step = "SLURM_STEP_NODELIST" in environ or "SLURM_STEP_NUM_NODES" in environ
    if step and of_step and groups < 2:
        # A step may have fewer nodes than its job.
        nodes = expand_nodelist(environ.get("SLURM_STEP_NODELIST", ""))
        count = _integer(environ, "SLURM_STEP_NUM_NODES", 1)
    else:
        # A step of several components sees only the nodes of its own component.
        suffixes = [f"_HET_GROUP_{group}" for group in range(groups)] or [""]
        lists = [environ.get(f"SLURM_JOB_NODELIST{suffix}", "") for suffix in suffixes]
        nodes = expand_nodelist(",".join(lists)) if all(lists) else ()
        count = max(groups, _integer(environ, "SLURM_JOB_NUM_NODES", 1))
    several = len(nodes) > 1 if nodes else count > 1
    # A step of one task is a program or a shell, whose child processes share no launcher.
    launches = step and environ.get("SLURM_STEP_NUM_TASKS") != "1"
    return Job("slurm", f"{job}.{step}" if launches else "", several, nodes)


_SHELL_STEPS = 0xFFFFFFF0
"""Slurm numbers steps without srun from here on: batch scripts and interactive shells."""


def _slurm_step(environ: Environ) -> str:
    """Return the step that srun made, or ""."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return "" if step.isdigit() and int(step) >= _SHELL_STEPS else step


def _leader_worker_set(environ: Environ) -> Job | None:
    leader = environ.get("LWS_LEADER_ADDRESS")
    if not leader:
        return None
    size = _integer(environ, "LWS_GROUP_SIZE", 1)
    # `name-0.name.namespace` leads `name-0-1.name.namespace`, `name-0-2...`
    name, dot, domain = leader.partition(".")
    workers = (f"{name}-{index}{dot}{domain}" for index in range(1, min(size, MAX_NODES)))
    return Job("lws", leader, size > 1, (leader, *workers))


def _indexed_job(environ: Environ) -> Job | None:
    index = environ.get("JOB_COMPLETION_INDEX")
    if index is None or "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    # The host name of such a pod is the job's name and the index.
    name = environ.get("HOSTNAME") or socket.gethostname()
    several = _integer(environ, "JOB_COMPLETION_INDEX", 0) > 0
    return Job("job", name.removesuffix(f"-{index}"), several)


def _ray(environ: Environ) -> Job | None:
    host = _host_of(environ.get("RAY_ADDRESS", "")) or _host_of(_of_ray("gcs_address"))
    # Only an initialised ray knows its session: a worker's children see only a number.
    session, job = _of_ray("get_session_name").removeprefix("session_"), _of_ray("get_job_id")
    if not job and not host:
        return None
    several = bool(host) and (not _is_this_host(host) or _ray_has_several_hosts())
    return Job(
        "ray",
        f"{session}-{job}" if job else "",
        several,
        (host,) if several else (),
        others_join=True,
    )


def _host_of(address: str) -> str:
    return address.removeprefix("ray://").rpartition(":")[0].strip("[]")


def _of_ray(attribute: str) -> str:
    """Return what an initialised ray knows of this process. Does not import ray.

    Workers have no RAY_ADDRESS.
    """
    ray = _initialised_ray()
    if ray is None:
        return ""
    found = getattr(ray.get_runtime_context(), attribute, "")
    return str(found() if callable(found) else found)


def waits_for_ray() -> bool:
    """Whether this process is about to join a Ray job: it has imported ray, or its variables
    name a cluster, and ray is not initialised yet."""
    return ("ray" in sys.modules or "RAY_ADDRESS" in os.environ) and _initialised_ray() is None


def ray_nodes() -> list[Any] | None:
    """Return the living nodes of an initialised ray's cluster; [] without one. None in a child
    forked after ray.init(), where a call to the cluster would never return."""
    if _of_the_parent:
        return None
    ray = _initialised_ray()
    return [node for node in ray.nodes() if node["Alive"]] if ray is not None else []


def _ray_has_several_hosts() -> bool:
    """Return whether the cluster has several hosts. True if unknown, so that no child starts a
    private plane on its host."""
    nodes = ray_nodes()
    return nodes is None or len({node["NodeManagerAddress"] for node in nodes}) > 1


def _initialised_ray() -> Any:
    ray = sys.modules.get("ray")
    return ray if ray is not None and getattr(ray, "is_initialized", bool)() else None


_of_the_parent = False
"""Whether this process inherited ray's state from its parent."""


def _after_fork() -> None:
    global _of_the_parent
    _of_the_parent = _initialised_ray() is not None


os.register_at_fork(after_in_child=_after_fork)


def _torchrun(environ: Environ) -> Job | None:
    if "WORLD_SIZE" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        return None
    # torchrun's default id is the word "none", which tells no two jobs apart.
    run = environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none")
    return _of_ranks(environ, "torchrun", run, "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _is_this_host(host: str) -> bool:
    """Whether an address belongs to this machine. Only then can a socket be bound to it."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _address_towards(host: str) -> str:
    """Return this host's address on the route to another host. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConnectError(
            f"cannot resolve or reach {host}, the first host of this job: {exc.strerror or exc}. "
            "Check DNS and routing, or set DATAPLANE_SEEDS to addresses that this host can reach",
            host=host,
        ) from exc


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _integer(environ: Environ, name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidConfig(
            f"the environment variable {name} is {text!r}, which is not an integer: "
            "correct or unset it"
        ) from None
