"""Drivers of a Ray job, for tests: `python ray_driver.py WHAT ADDRESS`; the last line is JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dataplane
import dataplane.integrations.ray
from dataplane.integrations.ray import Peers
from dataplane.launch import discovery, rundir, runs


@ray.remote(num_cpus=0)
class Stage:
    """A worker of one node; it only connects."""

    def __init__(self) -> None:
        self.plane = dataplane.connect()

    def whereabouts(self) -> tuple[str, str | None]:
        return self.plane.peer, discovery.node_peer()

    def write(self, number: int) -> dataplane.Ref:
        part = self.plane.partition("p", {"s": ["x"]}, free="drop", replicas=2)
        return part.put({"x": [np.full(10_000, number)]}, key=[f"k{number}"])

    def read(self, refs: list[dataplane.Ref]) -> list[int]:
        found = [np.asarray(self.plane.get(ref).numpy("x")) for ref in refs]
        assert all((values == values.flat[0]).all() for values in found)
        return [int(values.flat[0]) for values in found]


def placed(actor: Any, node: str) -> Any:
    """One of these actors, on this node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor.options(scheduling_strategy=strategy).remote()


def starters(peers: Peers) -> list[int]:
    """Ends, with -9, the workers that started the peers; their ids."""

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def attendants() -> list[int]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    title = file.read()
            except OSError:
                continue
            if title.startswith("ray::Attendant"):
                found.append(int(pid))
        return found

    found: list[int] = ray.get(attendants.remote())
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def pids() -> dict[str, int]:
    folder = rundir.plane_dir(runs.find_run().name)
    return {peer.name: peer.card.pid for peer in rundir.living_peers(folder) if peer.card}


def whole() -> None:
    """Refs between nodes; starters are killed; a node is added; everything is stopped."""
    with dataplane.integrations.ray.start(arena="64MiB") as peers:
        stages = [placed(Stage, node) for node in peers.nodes]
        places = ray.get([stage.whereabouts.remote() for stage in stages])
        refs = ray.get([stage.write.remote(n) for n, stage in enumerate(stages)])
        before = pids()
        killed = starters(peers)
        read = ray.get([stage.read.remote(refs) for stage in stages])
        with dataplane.connect() as plane:
            encrypted, members = plane.stats()["encrypted"], len(plane.stats()["peers"])
        after = pids()
        print("add a node", flush=True)
        sys.stdin.readline()
        peers.extend()
        late = placed(Stage, peers.nodes[-1])
        read.append(ray.get(late.read.remote(refs)))
        told = {"places": places, "read": read, "before": before, "after": after}
        told |= {"killed": len(killed), "encrypted": encrypted, "members": members}
        told |= {"nodes": len(peers.nodes)}
    print(json.dumps(told | {"left": pids()}), flush=True)


def abandon() -> None:
    """The job's peers are there; then it waits to be killed."""
    peers = dataplane.integrations.ray.start(arena="64MiB")
    print(json.dumps({"pids": pids(), "repr": repr(peers)}), flush=True)
    sys.stdin.readline()


@ray.remote(num_cpus=0)
class Runner:
    """As verl's: the driver starts it, somewhere, and knows nothing of a queue."""

    def __init__(self) -> None:
        import dataplane_transfer_queue

        dataplane_transfer_queue.init()
        self.queue = dataplane_transfer_queue

    def put(self, key: str) -> None:
        self.queue.kv_put(key, "train", {"of": key})

    def got(self) -> dict[str, Any]:
        keys = sorted(self.queue.kv_list("train")["train"])
        return dict(zip(keys, self.queue.kv_batch_get(keys, "train")["of"].tolist(), strict=True))

    def got_by_a_child(self) -> list[str]:
        """As a loader's worker does, in which Ray answers nothing."""
        reads, writes = os.pipe()
        if not os.fork():
            self.queue.init()
            os.write(writes, json.dumps(sorted(self.queue.kv_list("train")["train"])).encode())
            os._exit(0)
        os.close(writes)
        with open(reads, encoding="utf-8") as pipe:
            found: list[str] = json.loads(pipe.read())
        return found

    def close(self) -> None:
        self.queue.close()


def queue() -> None:
    """A queue that actors of all nodes begin at once."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    runners = [placed(Runner, node) for node in nodes]
    ray.get([runner.put.remote(f"k{number}") for number, runner in enumerate(runners)])
    told = {"got": ray.get([runner.got.remote() for runner in runners]), "peers": len(pids())}
    told |= {"child": ray.get(runners[-1].got_by_a_child.remote())}
    ray.get([runner.close.remote() for runner in runners])
    print(json.dumps(told | {"left": pids()}), flush=True)


if __name__ == "__main__":
    ray.init(address=sys.argv[2], log_to_driver=False)
    {"whole": whole, "abandon": abandon, "queue": queue}[sys.argv[1]]()
