"""`dataplane watch` of a real plane: the page, who is refused, and what it says of a dead peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.peers import free_ports
from dataplane import cli
from dataplane.launch.token import new_token
from tests.end_to_end.conftest import PLANE, Cluster, until
from tests.watch.plane import HOSTILE


@contextmanager
def watching(*more: str) -> Iterator[str]:
    """A page of the test's run: its link."""
    command = [sys.executable, "-m", "dataplane", "watch", "--run", PLANE, "--page", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            code = process.wait(20)
        assert code == 0


def fetched(url: str) -> str:
    """As a browser does it: a link leads to the page by way of a cookie."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(url, timeout=20) as answer:
        return str(answer.read().decode())


def refused(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetched(url)
    caught.value.close()
    return caught.value.code


def test_a_page_shows_a_run_to_those_with_its_link_and_says_when_a_peer_is_gone(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane, cluster.connect("b") as other:
        part = plane.partition(HOSTILE, stages={"train": ["x"]}, group_size=2)
        for group in range(3):
            part.put({"x": [1, 2]}, group=group)
        other.partition(HOSTILE).claim("train", groups=2, timeout=20).ack()
        with watching(f"127.0.0.1:{free_ports(1)[0]}") as link:
            address, _, query = link.partition("?")

            def view() -> dict[str, Any]:
                with urllib.request.urlopen(f"{address}live?{query}", timeout=20) as answer:
                    return dict(json.loads(answer.readline().removeprefix(b"data: ")))

            until(lambda: bool(view().get("steps")), "the step is shown")
            assert view()["sentence"].startswith(f"{HOSTILE} took ")
            assert view()["trouble"] == []
            (flow,) = view()["picture"]["flow"]
            assert (flow["ready"], flow["leased"], flow["acked"]) == (2, 0, 4)
            lanes = {(lane["stage"], lane["host"]) for lane in view()["picture"]["lanes"]}
            assert lanes >= {("train", "b")}
            until(lambda: len(view()["hosts"]) == 2, "the arenas are")
            assert HOSTILE not in fetched(link)  # the page itself says nothing of a run
            assert refused(address) == refused(f"{address}step") == refused(f"{address}live") == 403
            cluster.kill("b")
            until(lambda: bool(view()["trouble"]), "that it is gone is said")
            (told,) = view()["trouble"]
            assert "does not answer" in told or "peer b left the run or was declared lost" in told


def test_a_page_for_other_machines_needs_the_token(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start("a")
    with cluster.connect("a"):
        port = free_ports(1)[0]
        arguments = ["watch", "--run", PLANE, "--page", f"0.0.0.0:{port}"]
        assert cli.main(arguments) == 2
        assert "there is no cluster token" in capsys.readouterr().err
        assert cli.main(["watch", "--run", PLANE, "--page", "nonsense"]) == 2
        assert "use HOST:PORT, for example 127.0.0.1:8787" in capsys.readouterr().err
        token = tmp_path / "token"
        token.write_text(new_token())
        token.chmod(0o600)
        links = []
        for _ in range(2):
            with watching(f"0.0.0.0:{port}", "--token-file", str(token)) as link:
                links.append(link)
                query = link.partition("?")[2]
                assert "<h1" in fetched(f"http://127.0.0.1:{port}/?{query}")
                assert refused(f"http://127.0.0.1:{port}/") == 403
                assert token.read_text() not in link
        assert links[0] == links[1]  # it may be kept


def test_a_terminal_shows_the_same_sentence_as_why(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("step-1", stages={"train": ["x"]}, group_size=2)
        part.put({"x": [1, 2]}, group="g")
        part.claim("train", groups=1, timeout=20).ack()
        command = [sys.executable, "-m", "dataplane", "watch", "--run", PLANE]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.terminate()
        asked = [sys.executable, "-m", "dataplane", "why", "--run", PLANE]
        assert first == subprocess.run(asked, capture_output=True, text=True, check=True).stdout
