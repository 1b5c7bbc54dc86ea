"""Which plane this process belongs to, and the seeds of its peers, from launchers' variables.

| launcher | several hosts are seen by | seeds | plane |
|---|---|---|---|
| any | – | DATAPLANE_SEEDS (`none`: this host alone) | DATAPLANE_PLANE |
| Slurm | SLURM_JOB_NUM_NODES > 1 | SLURM_JOB_NODELIST, all het groups | SLURM_JOB_ID |
| Kubernetes LeaderWorkerSet | LWS_GROUP_SIZE > 1 | leader and its workers | LWS_LEADER_ADDRESS |
| Ray | RAY_ADDRESS names another host | that host | RAY_JOB_ID, or that of an initialised ray |
| torchrun | WORLD_SIZE > LOCAL_WORLD_SIZE | MASTER_ADDR | TORCHELASTIC_RUN_ID |
| Kubernetes Indexed Job, JobSet | JOB_COMPLETION_INDEX > 0 | – | host name less its index |

From the top: the plane is named by the first launcher that tells an id, seeds come from the first
that sees several hosts and names them; where hosts are seen and not named, SeedsMissing.

Chosen for Kubernetes: nothing tells a pod how many pods its Job, JobSet or StatefulSet has, so only
a LeaderWorkerSet derives seeds; the others want DATAPLANE_SEEDS, which their manifest knows
(`tcp://<set>-0.<service>:7101,...`). The first pod of an Indexed Job, and a Ray head, cannot see
from variables that there are others: give them seeds too.
A derived seed's port is a function of the plane's name, so that two jobs on one host differ.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from dataplane.errors import InvalidConfig, SeedsMissing
from dataplane.launch.config import is_loopback, parse_address, parse_seeds

Environ = Mapping[str, str]

MAX_NODES = 65_536
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ephemeral range of Linux


@dataclass(frozen=True, slots=True)
class Job:
    """What a launcher's variables say: its name, the job's id, whether there are several hosts,
    and the hosts of the seeds where they can be derived."""

    launcher: str
    id: str
    several_hosts: bool
    seed_hosts: tuple[str, ...] = ()


def plane_name(environ: Environ = os.environ) -> str:
    """DATAPLANE_PLANE, or the uid and the job's id: two experiments on one host never mix."""
    given = environ.get("DATAPLANE_PLANE")
    if given:
        return given
    job = next((job for job in jobs(environ) if job.id), None)
    return f"{os.getuid()}-{job.launcher}-{job.id}" if job else str(os.getuid())


def find_seeds(environ: Environ = os.environ) -> tuple[str, ...]:
    """Addresses of all peers in the plane's order, () for this host alone.

    Raises SeedsMissing where the job spans several hosts and nothing says which: a private plane
    on each of them would wait for rows for ever.
    """
    given = environ.get("DATAPLANE_SEEDS")
    if given:
        return parse_seeds(given)
    several = [job for job in jobs(environ) if job.several_hosts]
    if not several:
        return ()
    named = next((job.seed_hosts for job in several if job.seed_hosts), None)
    if named is None:
        launcher = several[0].launcher
        raise SeedsMissing(
            f"this {launcher} job spans several hosts, and its variables do not name them: "
            "set DATAPLANE_SEEDS=tcp://host-a:7101,tcp://host-b:7101 alike on every host "
            "(or DATAPLANE_SEEDS=none for a plane of this host alone)",
            launcher=launcher,
        )
    port = seed_port(plane_name(environ))
    return tuple(f"tcp://{_bracketed(host)}:{port}" for host in named)


def seed_port(plane: str) -> int:
    """The port of derived seeds, the same on every host of the plane."""
    return _FIRST_PORT + xxhash.xxh3_64_intdigest(plane.encode()) % _PORTS


def own_seed(seeds: tuple[str, ...]) -> str | None:
    """The first seed that is an address of this host: where its peer listens."""
    return next((seed for seed in seeds if _is_this_host(parse_address(seed)[0])), None)


def jobs(environ: Environ = os.environ) -> list[Job]:
    """The launchers whose variables are there, in the table's order."""
    found = (look(environ) for look in (_slurm, _leader_worker_set, _ray, _torchrun, _indexed_job))
    return [job for job in found if job is not None]


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Slurm's compressed host list: `a[01-03,7],b` is a01 a02 a03 a7 b."""
    nodes: list[str] = []
    for item in _split_outside_brackets(nodelist):
        for node in _expand(item):
            nodes.append(node)
            if len(nodes) > MAX_NODES:
                raise InvalidConfig(f"{nodelist!r} names more than {MAX_NODES} nodes")
    return tuple(dict.fromkeys(nodes))


def _expand(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, closing, tail = rest.partition("]")
    if not closing:
        raise InvalidConfig(f"{item!r} is not a Slurm node list")
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise InvalidConfig(f"{item!r} is not a Slurm node list")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for end in _expand(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def _split_outside_brackets(text: str) -> list[str]:
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _slurm(environ: Environ) -> Job | None:
    # The components of a heterogeneous job have ids of their own; the first one's names them all.
    job = environ.get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID")
    if not job:
        return None
    groups = _integer(environ, "SLURM_HET_SIZE", 0)
    suffixes = [f"_HET_GROUP_{group}" for group in range(groups)] or [""]
    lists = [environ.get(f"SLURM_JOB_NODELIST{suffix}", "") for suffix in suffixes]
    nodes = expand_nodelist(",".join(lists)) if all(lists) else ()
    count = max(len(nodes), groups, _integer(environ, "SLURM_JOB_NUM_NODES", 1))
    several = len(nodes) > 1 if nodes else count > 1
    return Job("slurm", job, several, nodes)


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
    address = environ.get("RAY_ADDRESS", "")
    job = environ.get("RAY_JOB_ID") or _initialised_ray_job()
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    if not job and not host:
        return None
    elsewhere = bool(host) and not _is_this_host(host)
    return Job("ray", job, elsewhere, (host,) if elsewhere else ())


def _initialised_ray_job() -> str:
    """A driver has no RAY_JOB_ID, but its ray knows; ray is asked only where it is imported."""
    ray = sys.modules.get("ray")
    if ray is None or not getattr(ray, "is_initialized", bool)():
        return ""
    return str(ray.get_runtime_context().get_job_id())


def _torchrun(environ: Environ) -> Job | None:
    if "WORLD_SIZE" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        return None
    world = _integer(environ, "WORLD_SIZE", 1)
    several = world > _integer(environ, "LOCAL_WORLD_SIZE", world)
    master = environ.get("MASTER_ADDR", "")
    # torchrun's default id is the word "none", which tells no two jobs apart.
    run = environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none")
    return Job("torchrun", run, several, (master,) if master else ())


def _is_this_host(host: str) -> bool:
    """Whether an address is one of this machine's: only then can a socket be bound to it."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _integer(environ: Environ, name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidConfig(f"{name}={text!r} is not a number") from None
