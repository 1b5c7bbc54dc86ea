"""Frames of the controller over a real socket pair."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.columns import Array, all_fields
from bench.planes.base import Batch, Columns, Job, Worker
from bench.planes.controller import Connection, Controller, ControllerEndpoint
from bench.planes.frames import Frame, Landing, pack, receive_into, receive_table, send, unpack
from bench.run import prepared

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def transfer(pair: Pair, columns: Columns, dedup: bool) -> tuple[Frame, dict[str, list[Array]]]:
    frame, parts = pack("rows", columns, dedup, prompt=5)
    sender = threading.Thread(target=send, args=(pair[0], frame, parts))
    sender.start()
    received, nbytes = receive_table(pair[1])
    room = Landing(1).keep(nbytes)
    receive_into(pair[1], room)
    sender.join()
    return received, unpack(received, room)


ONE = Job(plane="controller", trace="math", dedup=False, prompts=1)


@pytest.mark.timeout(60)
def test_a_controller_that_cannot_greet_its_workers_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(listener: socket.socket) -> None:
        raise RuntimeError("can't start new thread")

    job = prepared(ONE, tmp_path)
    controller = Controller(job, f"{tmp_path}/c.sock", barriers=True)
    with controller._unix, controller._tcp:
        monkeypatch.setattr(controller, "_greet", failing)
        with pytest.raises(RuntimeError, match="new thread"):
            controller.run()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("barriers", [True, False])
def test_a_controller_ends_when_its_workers_know_that_nothing_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, barriers: bool
) -> None:
    """Its process ends with it, which a trainer that waits for a next frame takes for its death."""
    job = prepared(ONE, tmp_path)
    held, go_on, send_now = threading.Event(), threading.Event(), Connection.send

    def slow(worker: Connection, frame: Frame, parts: Sequence[Any] = ()) -> None:
        if (worker.role, frame.kind) == ("train", "end"):
            held.set()
            go_on.wait()
        send_now(worker, frame, parts)

    def endpoint(role: str, rank: int = 0) -> ControllerEndpoint:
        address = {"path": path}
        worker = Worker(job=job, address=address, role=role, rank=rank, host=0)
        return ControllerEndpoint(worker)

    def all_batches(end: ControllerEndpoint, role: str) -> list[Batch]:
        return list(end.batches(0, role))

    monkeypatch.setattr(Connection, "send", slow)
    path = f"{tmp_path}/c.sock"
    controller = Controller(job, path, barriers)
    with controller._unix, controller._tcp, ThreadPoolExecutor() as threads:
        controller._unix.listen()
        rollouts = [endpoint("rollout", host) for host in range(job.hosts)]
        readers = [("reward", host) for host in range(job.hosts)]
        readers += [("reference", host) for host in range(job.hosts)]
        readers += [("train", rank) for rank in range(job.trainers)]
        ends = [endpoint(*reader) for reader in readers]
        try:
            running = threads.submit(controller.run)
            read = [
                threads.submit(all_batches, end, role)
                for end, (role, _) in zip(ends, readers, strict=True)
            ]
            values = [np.zeros(1)] * job.samples
            names = [field.name for field in all_fields(job.task)]
            rollouts[0].put(0, 0, dict.fromkeys(names, values))
            for one in rollouts:
                one.finish(0)
            held.wait()
            with pytest.raises(TimeoutError):
                running.result(timeout=0.5)
        finally:
            go_on.set()
        running.result()
        assert sum(len(batches.result()) for batches in read) == 3
        for one in (*rollouts, *ends):
            one.close()
        for listener in (controller._unix, controller._tcp):  # its process would end now
            listener.shutdown(socket.SHUT_RDWR)
        for connection in controller._connections:
            connection.sock.close()


COLUMNS: Columns = {
    "tokens": [np.arange(n, dtype=np.int64) for n in (3, 0, 70_000)],
    "log_probs": [np.linspace(0, 1, n, dtype=np.float32) for n in (1, 2, 3)],
    "positions": [np.arange(3 * n).reshape(3, n) for n in (4, 5, 6)],
    "media": [np.ones((500, 1176), np.float32)] * 3,
}


@pytest.mark.parametrize("dedup", [False, True])
def test_ragged_columns_arrive_as_they_were_sent(pair: Pair, dedup: bool) -> None:
    frame, columns = transfer(pair, COLUMNS, dedup)
    assert frame.kind == "rows" and frame.prompt == 5
    for name, values in COLUMNS.items():
        for sent, got in zip(values, columns[name], strict=True):
            assert got.dtype == sent.dtype and np.array_equal(got, sent)
            assert got.flags.aligned


def test_with_dedup_a_shared_array_travels_once(pair: Pair) -> None:
    media = COLUMNS["media"][0].nbytes
    frame, columns = transfer(pair, {"media": COLUMNS["media"]}, dedup=True)
    assert frame.parts == [media]
    # And it is known as shared when it is sent on.
    assert pack("rows", columns, dedup=True)[0].parts == [media]
    assert pack("rows", columns, dedup=False)[0].parts == [media] * 3


def test_more_arrays_than_one_system_call_takes_arrive(pair: Pair) -> None:
    many = {"x": [np.full(3, i) for i in range(3000)]}
    _, columns = transfer(pair, many, dedup=False)
    assert all(np.array_equal(a, b) for a, b in zip(columns["x"], many["x"], strict=True))


def test_a_closed_connection_is_an_end_of_file(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(EOFError):
        receive_table(pair[1])


@pytest.mark.parametrize("header", [(b"HTTP", 10, 0), (b"BCF1", 1 << 31, 0)])
def test_what_is_no_frame_is_refused(pair: Pair, header: tuple[bytes, int, int]) -> None:
    pair[0].sendall(struct.pack("<4sIQ", *header))
    with pytest.raises(ValueError, match="not a frame"):
        receive_table(pair[1])


def test_kept_room_is_not_given_twice_until_all_is_free_again() -> None:
    landing = Landing(1024)
    first, second = landing.keep(512), landing.keep(512)
    first[:], second[:] = 1, 2
    assert first.max() == 1
    beyond = landing.keep(4096)
    assert beyond.size == 4096
    landing.rewind()
    assert landing.keep(1000).ctypes.data == first.ctypes.data
