"""The Helm chart, rendered by Helm, and the manifests: Kubernetes' schemas, and what must hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.cli import _parser, peer_config
from dataplane.errors import ConnectError
from dataplane.launch.embedded import attach
from dataplane.launch.values import check_peer_name, parse_seeds, parse_size

helm = pytest.importorskip("helm_python", reason="make test-deploy brings it")
schemas = pytest.importorskip("kubernetes_validate", reason="make test-deploy brings it")
yaml = pytest.importorskip("yaml", reason="make test-deploy brings it")

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
CHART = KUBERNETES / "dataplane"
TOKEN = {"token": {"secretName": "dataplane-token"}}
FULL = {
    **TOKEN,
    "joined": 2,
    "spill": {"enabled": True, "size": "100Gi", "storageClassName": "local"},
    "podMonitor": {"enabled": True},
    "roster": "etcd://etcd:2379",
    "extraResources": {"rdma/ib": 1},
    "extraCapabilities": ["IPC_LOCK"],
    "resources": {"limits": {"memory": "12Gi", "cpu": "4"}},
}
Manifest = dict[str, Any]


def render(values: dict[str, Any]) -> list[Manifest]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="plane", namespace="rl")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """Every pod that is made from a manifest, wherever its template is."""
    for key, value in manifest.items():
        if key == "template" and "containers" in value.get("spec", {}):
            yield value["spec"]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, dict):
                yield from pods(child)


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def manifests_of(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def all_pods() -> list[Manifest]:
    rendered = [*render(TOKEN), *render(FULL)]
    plain = [one for path in KUBERNETES.glob("*.yaml") for one in manifests_of(path.name)]
    return [pod for one in (*rendered, *plain) for pod in pods(one)]


def test_helm_has_nothing_against_the_chart() -> None:
    report = helm.lint(CHART, TOKEN, strict=True)
    assert not report["errors"], report
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("values", [TOKEN, FULL], ids=["default", "everything"])
def test_kubernetes_knows_every_field(values: dict[str, Any]) -> None:
    for manifest in render(values):
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            schemas.validate(manifest, "1.30", strict=True)


def test_kubernetes_knows_every_field_of_a_pod() -> None:
    """Of the kinds that others define, their pods."""
    found = all_pods()
    assert len(found) >= 6
    for pod in found:
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
        schemas.validate(made, "1.30", strict=True)


def test_without_a_token_nothing_is_rendered() -> None:
    with pytest.raises(helm.HelmRenderError, match=r"token\.secretName is missing"):
        render({})


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"arena": "8Gi"}, "9216Mi"),
        ({"arena": "512Mi", "overhead": "256Mi"}, "768Mi"),
        ({"arena": "1Ti"}, "1049600Mi"),
        ({"arena": "8Gi", "resources": {"limits": {"memory": "9Gi"}}}, "9Gi"),
        ({"arena": "8Gi", "resources": {"limits": {"memory": "8Gi"}}}, None),
        ({"arena": "1Ti", "resources": {"limits": {"memory": "1024Gi"}}}, None),
    ],
)
def test_the_memory_limit_leaves_room_beside_the_arena(
    values: dict[str, Any], limit: str | None
) -> None:
    if limit is None:
        with pytest.raises(helm.HelmRenderError, match="give at least"):
            render({**TOKEN, **values})
        return
    (peers,) = of_kind(render({**TOKEN, **values}), "StatefulSet")
    resources = peers["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == limit


@pytest.mark.parametrize("values", [{"arena": "8GB"}, {"peers": 0}, {"port": 70000}, {"uid": 0}])
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render({**TOKEN, **values})


def test_the_peers_of_both_sets_have_one_roster_and_only_joiners_join() -> None:
    founding, joined = of_kind(render(FULL), "StatefulSet")
    first, second = (_arguments(one) for one in (founding, joined))
    assert first["--seeds"] == second["--seeds"]
    assert "--join" not in first and "--join" in second
    domain = "plane.rl.svc.cluster.local:7101"
    assert parse_seeds(first["--seeds"]) == tuple(f"tcp://plane-{n}.{domain}" for n in range(3))
    assert first["--listen"] == f"tcp://$(POD_NAME).{domain}"
    (service,) = of_kind(render(FULL), "Service")
    assert service["metadata"]["name"] == founding["spec"]["serviceName"] == "plane"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert joined["spec"]["replicas"] == 2 and founding["spec"]["replicas"] == 3


def test_peers_have_names_of_their_own_that_are_short_enough() -> None:
    with helm.Chart.load(CHART) as chart:
        files = chart.render({**FULL, "joined": 1000}, name="r" * 53, namespace="rl")
    sets = list(yaml.safe_load_all(files["dataplane/templates/statefulsets.yaml"]))
    for one in filter(None, sets):
        assert _arguments(one)["--name"] == "$(POD_NAME)"
        check_peer_name(f"{one['metadata']['name']}-999")


def test_a_worker_without_its_nodes_peer_fails_and_makes_no_plane_of_its_own(
    run_dir: Path,
) -> None:
    (variables,) = of_kind(render(TOKEN), "ConfigMap")
    founding = of_kind(render(TOKEN), "StatefulSet")[0]
    assert variables["data"]["DATAPLANE_SEEDS"] == _arguments(founding)["--seeds"]
    assert variables["data"]["DATAPLANE_RUN"] == _arguments(founding)["--run"]
    environ = {**variables["data"], "DATAPLANE_RUN_DIR": str(run_dir)}
    with pytest.raises(ConnectError, match="none of the seeds"):
        attach(environ=environ)


def _arguments(manifest: Manifest) -> dict[str, str]:
    (pod,) = pods(manifest)
    return {key: value for key, _, value in (a.partition("=") for a in _args(pod))}


def _args(pod: Manifest) -> list[str]:
    args: list[str] = pod["containers"][0]["args"]
    return args


@pytest.mark.parametrize("values", [TOKEN, FULL], ids=["default", "everything"])
def test_a_peer_takes_the_arguments_that_a_pod_gives_it(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the node, but for its paths, its size and its name."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(tmp_path / "run"))
    for nth, one in enumerate(of_kind(render({**values, "arena": "64Mi"}), "StatefulSet")):
        (pod,) = pods(one)
        pod_name = f"{one['metadata']['name']}-{nth}"
        given = [arg.replace("$(POD_NAME)", pod_name) for arg in _args(pod)]
        given = [arg.replace("/token/token", str(token)) for arg in given]
        given = [arg.replace("/spill:", f"{tmp_path}:") for arg in given]
        config = peer_config(_parser().parse_args(given))
        assert config.arena_bytes == 64 << 20
        assert config.metrics is not None and config.metrics.port == 9464
        assert config.join == (nth == 1) and len(config.seeds) == 3


def test_probes_ask_where_metrics_are_shown_and_a_drain_has_time() -> None:
    (pod,) = pods(of_kind(render(TOKEN), "StatefulSet")[0])
    (peer,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in peer["ports"]}
    assert f"--metrics=0.0.0.0:{ports['metrics']}" in peer["args"]
    for probe, path in (("liveness", "/healthz"), ("readiness", "/readyz")):
        assert peer[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "metrics"}
        assert peer[f"{probe}Probe"]["timeoutSeconds"] > 5, "a peer may take 5 s to answer"
    assert pod["terminationGracePeriodSeconds"] >= 75, "a peer hands over for up to 60 s"


def test_only_peers_reach_peers_and_only_prometheus_reads_metrics() -> None:
    manifests = render(TOKEN)
    (policy,) = of_kind(manifests, "NetworkPolicy")
    among, metrics = policy["spec"]["ingress"]
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert among == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert metrics["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    (peers,) = of_kind(manifests, "StatefulSet")
    assert labels.items() <= peers["spec"]["template"]["metadata"]["labels"].items()


def test_no_container_may_do_more_than_it_needs() -> None:
    for pod in all_pods():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        for one in containers(pod):
            context = one["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"]["drop"] == ["ALL"]
            is_root = context.get("runAsUser") == 0
            assert is_root == (one["name"] == "run-dir"), "but for a host path's owner"
            assert not re.search(r":latest$", one["image"]) or one["name"] == "worker"


def test_a_token_is_a_file_of_mode_0600_and_in_no_variable_or_argument() -> None:
    for pod in all_pods():
        (copy,) = (one for one in pod["initContainers"] if one["name"] == "token")
        assert copy["command"] == ["install", "-m", "0600", "/secret/token", "/token/token"]
        (volume,) = (v for v in pod["volumes"] if v["name"] == "token")
        assert volume["emptyDir"]["medium"] == "Memory"
        for one in containers(pod):
            assert not any("secretKeyRef" in str(env) for env in one.get("env", []))


def job_set() -> Manifest:
    (manifest,) = manifests_of("jobset.yaml")
    assert manifest["kind"] == "JobSet"
    return dict(manifest)


def test_the_seeds_of_the_job_set_are_its_pods() -> None:
    manifest = job_set()
    name, space = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    hosts = [
        f"{name}-{role['name']}-{job}-{pod}.{name}.{space}.svc.cluster.local"
        for role in manifest["spec"]["replicatedJobs"]
        for job in range(role["replicas"])
        for pod in range(role["template"]["spec"]["parallelism"])
    ]
    found = {env["value"] for pod in pods(manifest) for env in _env(pod, "DATAPLANE_SEEDS")}
    (seeds,) = found
    assert sorted(parse_seeds(seeds)) == sorted(f"tcp://{host}:7101" for host in hosts)


def test_every_worker_with_a_peer_inside_has_memory_for_its_arena() -> None:
    for pod in pods(job_set()):
        (worker,) = pod["containers"]
        (arena,) = _env(pod, "DATAPLANE_ARENA")
        limit = parse_size(worker["resources"]["limits"]["memory"].replace("i", "iB"))
        assert parse_size(arena["value"]) + (1 << 30) < limit


def _env(pod: Manifest, name: str) -> list[dict[str, str]]:
    return [env for one in pod["containers"] for env in one["env"] if env["name"] == name]


def test_the_pods_of_the_ray_job_are_sound_and_have_memory_for_arena_and_object_store() -> None:
    manifest = yaml.safe_load((KUBERNETES.parent / "ray/rayjob.yaml").read_text())
    cluster = manifest["spec"]["rayClusterSpec"]
    store = int(cluster["headGroupSpec"]["rayStartParams"]["object-store-memory"])
    found = list(pods(manifest))
    assert len(found) == 2
    for pod in found:
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
        schemas.validate(made, "1.30", strict=True)
        (arena,) = _env(pod, "DATAPLANE_ARENA")
        limit = pod["containers"][0]["resources"]["limits"]["memory"].replace("i", "iB")
        assert store + parse_size(arena["value"]) + (1 << 30) < parse_size(limit)
        assert pod["securityContext"]["runAsNonRoot"]
