"""What goes to another process: planes and partitions reconnect there, batches say how they go."""

from __future__ import annotations

import multiprocessing
import pickle  # noqa: S403
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Plane, aio
from tests.same import dense

SPAWN = multiprocessing.get_context("spawn")


def consume(plane: Plane, part: dataplane.Partition, ref: dataplane.Ref, out: Any) -> None:
    rows = sorted(int(x[0]) for batch in part.stream("s", rows=2) for x in batch["x"])
    out.put((rows, plane.partitions(), plane.get(ref)["x"][0].tolist()))


def test_a_plane_and_a_partition_reconnect_where_they_are_unpickled(plane: Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"]}, free="drop")
    ref = part.put({"x": np.arange(4).reshape(4, 1)})
    part.seal()
    out = SPAWN.Queue()
    worker = SPAWN.Process(target=consume, args=(plane, part, ref, out))
    worker.start()
    assert out.get(timeout=60) == ([0, 1, 2, 3], ["p"], [0])
    worker.join()


async def test_so_do_those_of_an_event_loop(plane: Plane) -> None:
    plane.partition("p", stages={"s": ["x"]}).put({"x": [1]})
    async with aio.connect("a", run=plane.name) as first:
        part = await first.partition("p")
        again, same = pickle.loads(pickle.dumps((first, part)))  # noqa: S301
        assert await again.partitions() == ["p"] and again is not first
        batch = await same.claim("s", rows=1, timeout=20)
        with pytest.raises(TypeError, match=r"send batch\.ref"):
            pickle.dumps(batch)
        await batch.release()
        await again.close()


def test_a_batch_says_how_it_goes_to_another_process(plane: Plane) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [1, 2]}, key=["a", "b"], group="g")
    batch = part.claim("s", rows=2, timeout=20)
    with pytest.raises(TypeError, match=r"a Batch cannot be sent .* send batch\.ref"):
        pickle.dumps(batch)
    ref = pickle.loads(pickle.dumps(batch.ref))  # noqa: S301
    assert (ref.keys, ref.groups, ref.fields) == (["a", "b"], ("g",), ("x",))
    assert list(plane.get(ref)["x"]) == [1, 2]
    assert pickle.loads(pickle.dumps(batch["x"])) == [1, 2]  # noqa: S301
    with pytest.raises(TypeError, match=r"a Stream cannot be sent .* send the partition"):
        pickle.dumps(part.stream("s", rows=1))


def test_numpy_gives_private_copies_and_views_where_asked_for(plane: Plane) -> None:
    part = plane.partition("p", free="drop")
    part.put(
        {
            "x": np.arange(6).reshape(2, 3),
            "r": [np.arange(2), np.arange(3)],
            "o": [{"a": np.arange(2)}, {"a": 1}],
        }
    )
    rows = part.get()
    x, (r, _), (o, _) = dense(rows.numpy("x")), rows.numpy("r"), rows.numpy("o")
    x[0, 0], r[0], o["a"][0] = 7, 7, 7
    assert [rows["x"][0][0], rows["r"][0][0], rows["o"][0]["a"][0]] == [0, 0, 0]
    assert not dense(rows.numpy("x", view=True)).flags.writeable
    assert not rows.numpy("r", view=True)[0].flags.writeable
    assert not rows.numpy("o", view=True)[0]["a"].flags.writeable


def test_an_unsupported_system_is_one_clear_import_error() -> None:
    code = "import sys; sys.platform = 'darwin'; import dataplane"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: dataplane runs only on Linux")
    assert dataplane.TransportMissing.__mro__[1] is dataplane.DataplaneError
