"""Seeds and names of runs from the variables of launchers."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import ConnectError, InvalidConfig, SeedsMissing
from dataplane.launch import discovery
from dataplane.launch.discovery import (
    Place,
    expand_nodelist,
    launchers_run,
    node_peer,
    own_seed,
    ray_nodes,
    seed_port,
)

RUN = "grpo"


def find_seeds(environ: dict[str, str]) -> tuple[str, ...]:
    return discovery.find_seeds(RUN, environ)


def find_place(environ: dict[str, str]) -> Place:
    return discovery.find_place(RUN, environ)


def hosts(seeds: tuple[str, ...]) -> list[str]:
    return [seed.removeprefix("tcp://").rpartition(":")[0] for seed in seeds]


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("a[01-03,7],b", "a01 a02 a03 a7 b"),
        ("gpu-[098-101]", "gpu-098 gpu-099 gpu-100 gpu-101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a[1-2].cluster", "a1.cluster a2.cluster"),
        ("", ""),
    ],
)
def test_slurms_node_lists_are_expanded(nodelist: str, nodes: str) -> None:
    assert expand_nodelist(nodelist) == tuple(nodes.split())


@pytest.mark.parametrize("nodelist", ["a[1-", "a[x]", "a[1--2]", "a[0-99999999]"])
def test_a_broken_node_list_is_refused(nodelist: str) -> None:
    with pytest.raises(InvalidConfig):
        expand_nodelist(nodelist)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True))
def test_a_node_list_of_single_numbers_names_each(numbers: list[int]) -> None:
    nodelist = "n[" + ",".join(f"{number:03d}" for number in numbers) + "]"
    assert expand_nodelist(nodelist) == tuple(f"n{number:03d}" for number in numbers)


def test_without_a_launcher_the_host_is_alone() -> None:
    assert find_seeds({}) == ()
    assert launchers_run({}) is None


def test_given_variables_win() -> None:
    environ = {
        "DATAPLANE_SEEDS": "tcp://a:1, tcp://b:2,",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x[1-2]",
    }
    assert find_seeds(environ) == ("tcp://a:1", "tcp://b:2")
    assert find_seeds({**environ, "DATAPLANE_SEEDS": "none"}) == ()


def test_a_seed_that_is_no_address_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="tcp://host:port"):
        find_seeds({"DATAPLANE_SEEDS": "host-a"})


def test_slurm() -> None:
    environ = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "a[1-3]"}
    assert launchers_run({**environ, "SLURM_STEP_ID": "0"}) == "slurm-42.0"
    assert launchers_run(environ) is None  # a script or a shell, in which steps are started
    port = seed_port(RUN)
    assert find_seeds(environ) == tuple(f"tcp://a{number}:{port}" for number in (1, 2, 3))
    assert find_seeds({"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a1"}) == ()
    with pytest.raises(SeedsMissing, match="DATAPLANE_SEEDS"):
        find_seeds({"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "3"})


FOUR_NODES = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "a[1-4]"}


def test_a_slurm_step_has_its_own_nodes_and_not_those_of_its_job() -> None:
    step = {**FOUR_NODES, "SLURM_STEP_ID": "3"}
    one = {**step, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "a2"}
    assert find_seeds(one) == () and launchers_run(one) == "slurm-42.3"
    assert find_seeds({**step, "SLURM_STEP_NUM_NODES": "1"}) == ()
    two = {**step, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a[2,4]"}
    assert hosts(find_seeds(two)) == ["a2", "a4"]
    with pytest.raises(SeedsMissing):
        find_seeds({**step, "SLURM_STEP_NUM_NODES": "2"})
    # What a batch script finds in its environment of the step that it was itself submitted from.
    assert hosts(find_seeds({**one, "SLURM_STEP_ID": ""})) == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize(
    "shell",
    [
        {},
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": "4294967290"},  # the shell of an interactive allocation
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash, srun script.sh
    ],
)
def test_a_slurm_step_that_is_one_shell_launches_nothing(shell: dict[str, str]) -> None:
    assert launchers_run({"SLURM_JOB_ID": "42", **shell}) is None
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "a2"}
    if shell.get("SLURM_STEP_ID") == "0":
        assert find_seeds({**FOUR_NODES, **shell, **step}) == ()


def test_a_heterogeneous_slurm_job_is_one_plane() -> None:
    environ = {
        "SLURM_JOB_ID": "43",
        "SLURM_JOB_ID_HET_GROUP_0": "42",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "cpu1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[1-2]",
    }
    assert launchers_run({**environ, "SLURM_STEP_ID": "1"}) == "slurm-42.1"
    assert hosts(find_seeds(environ)) == ["cpu1", "gpu1", "gpu2"]


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-vm-1297@1",
}
"""as Open MPI 5.0.11 gives them to a rank"""


def test_open_mpi() -> None:
    assert launchers_run(OPEN_MPI) == "openmpi-prterun-vm-1297@1"
    assert find_seeds(OPEN_MPI) == ()
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with pytest.raises(SeedsMissing, match="DATAPLANE_SEEDS"):
        find_seeds(several)
    assert hosts(find_seeds({**several, "MASTER_ADDR": "10.0.0.1"})) == ["10.0.0.1"]
    # Open MPI 4 has no name for a job but a number.
    older = {**OPEN_MPI, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "3428122625"}
    assert launchers_run(older) == "openmpi-3428122625"


def test_open_mpi_in_a_slurm_job() -> None:
    """Ranks of other nodes are started by srun, and have a step; mpirun's own have none."""
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a[1-2]"}
    ranks = {**OPEN_MPI, **slurm, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    elsewhere = {**ranks, "SLURM_STEP_ID": "0"}
    assert launchers_run(ranks) == launchers_run(elsewhere) == "openmpi-prterun-vm-1297@1"
    assert hosts(find_seeds(ranks)) == hosts(find_seeds(elsewhere)) == ["a1", "a2"]


def test_torchrun() -> None:
    environ = {
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "TORCHELASTIC_RUN_ID": "r1",
    }
    assert launchers_run(environ) == "torchrun-r1"
    assert launchers_run({**environ, "TORCHELASTIC_RUN_ID": "none"}) is None
    assert hosts(find_seeds(environ)) == ["10.0.0.1"]
    assert find_seeds({**environ, "WORLD_SIZE": "8"}) == ()
    with pytest.raises(SeedsMissing):
        find_seeds({**environ, "MASTER_ADDR": ""})
    with pytest.raises(InvalidConfig, match="WORLD_SIZE"):
        find_seeds({**environ, "WORLD_SIZE": "many"})


def test_a_leader_worker_set_of_kubernetes() -> None:
    environ = {"LWS_LEADER_ADDRESS": "rl-0.rl.default", "LWS_GROUP_SIZE": "3"}
    assert hosts(find_seeds(environ)) == [
        "rl-0.rl.default",
        "rl-0-1.rl.default",
        "rl-0-2.rl.default",
    ]
    assert launchers_run(environ) == "lws-rl-0.rl.default"
    assert find_seeds({**environ, "LWS_GROUP_SIZE": "1"}) == ()


def test_a_later_pod_of_an_indexed_job_needs_seeds() -> None:
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "2",
        "HOSTNAME": "grpo-2",
    }
    assert launchers_run(environ) == "job-grpo"
    with pytest.raises(SeedsMissing, match="DATAPLANE_SEEDS"):
        find_seeds(environ)
    assert find_seeds({**environ, "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "grpo-0"}) == ()


def test_ray() -> None:
    assert launchers_run({"RAY_JOB_ID": "01000000"}) is None  # of which of its sessions?
    elsewhere = {"RAY_ADDRESS": "192.0.2.7:6379", "RAY_JOB_ID": "01000000"}
    assert hosts(find_seeds(elsewhere)) == ["192.0.2.7"]
    for here in ("127.0.0.1:6379", f"{socket.gethostname()}:6379", "auto", "ray://[::1]:10001"):
        assert find_seeds({"RAY_ADDRESS": here}) == ()


def initialised_ray(monkeypatch: pytest.MonkeyPatch, head: str, *nodes: str) -> None:
    """What a driver's ray says; nodes: their addresses."""
    context = SimpleNamespace(
        get_job_id=lambda: "02000000",
        get_session_name=lambda: "session_2026-11-23_4711",
        get_node_id=lambda: "ab" * 28,
        gcs_address=f"{head}:6379",
    )
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        nodes=lambda: [{"NodeManagerAddress": node, "Alive": True} for node in nodes],
    )
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_ray_driver_is_in_the_run_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised_ray(monkeypatch, "127.0.0.1", "127.0.0.1", "127.0.0.1")
    worker = {"RAY_JOB_ID": "ffffffff"}
    assert launchers_run({}) == launchers_run(worker) == "ray-2026-11-23_4711-02000000"
    assert find_seeds({}) == ()
    assert node_peer({}) == "ray-" + "ab" * 8 == node_peer({"RAY_NODE_ID": "ab" * 28})


def test_workers_of_ray_ask_it_for_the_head_and_whether_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    initialised_ray(monkeypatch, "127.0.0.1", "127.0.0.1", "192.0.2.8")
    assert hosts(find_seeds({})) == ["127.0.0.1"]
    initialised_ray(monkeypatch, "192.0.2.7", "192.0.2.7", "192.0.2.8")
    assert hosts(find_seeds({"RAY_JOB_ID": "01000000"})) == ["192.0.2.7"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_never_asks_its_parents_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised_ray(monkeypatch, "127.0.0.1", "127.0.0.1")
    assert len(ray_nodes() or ()) == 1 and find_seeds({}) == ()
    child = os.fork()
    if not child:
        vars(sys.modules["ray"])["nodes"] = None  # whoever calls it waits for ever
        right = ray_nodes() is None and hosts(find_seeds({})) == ["127.0.0.1"]
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_host_that_is_not_the_first_joins_it_from_its_own_address() -> None:
    first = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    seeds = find_seeds(first)
    assert find_place(first) == Place(seeds, seeds[0])
    port = seed_port(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "_is_this_host", lambda host: False)
        assert find_place(first) == Place(seeds, f"tcp://127.0.0.1:{port}", join=True)
        # In a list of all hosts each is a seed, and who is not listed does not join.
        listed = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a[1-2]"}
        assert find_place(listed) == Place(find_seeds(listed), None)


def test_a_first_host_that_nobody_knows_is_told() -> None:
    first = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"}
    with pytest.raises(ConnectError, match="no-such-host.invalid"):
        find_place(first)


def test_hosts_that_one_launcher_sees_are_named_by_another() -> None:
    environ = {
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "HOSTNAME": "grpo-1",
    }
    assert hosts(find_seeds(environ)) == ["10.0.0.1"]


def test_a_peer_listens_at_the_seed_of_its_own_host() -> None:
    assert own_seed(("tcp://192.0.2.7:1", "tcp://127.0.0.1:2")) == "tcp://127.0.0.1:2"
    assert own_seed(("tcp://192.0.2.7:1",)) is None


def test_derived_ports_are_below_the_ephemeral_ones() -> None:
    assert all(20_000 <= seed_port(f"run-{number}") < 30_000 for number in range(100))
