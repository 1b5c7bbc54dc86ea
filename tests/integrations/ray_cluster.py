"""A Ray cluster of several raylets for a test: `python ray_cluster.py FOLDER RAYLETS`.

Says the head's address when all are there; a line on standard input adds a raylet, which is said as
well; the end of input ends the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

_STORE_BYTES = 80 << 20


def main(folder: str, raylets: int) -> None:
    head = {
        "num_cpus": 1,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
        "temp_dir": f"{folder}/ray",
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(raylets - 1):
            cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
            print("added", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
