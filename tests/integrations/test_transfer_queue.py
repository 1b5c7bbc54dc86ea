"""TransferQueue's surface gives what TransferQueue 0.1.11 gives, but for what its pages list.

What 0.1.11 gave to the same calls is kept beside this file; where it is installed it is asked anew
(`make test-compare`), so that the record is its own and nobody's wish.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pickle  # noqa: S403
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict", reason="make test installs it")
omegaconf = pytest.importorskip("omegaconf", reason="make test installs it")
pytest.importorskip("dataplane_transfer_queue", reason="make test installs it")

import dataplane  # noqa: E402
import dataplane_transfer_queue as transfer_queue  # noqa: E402
from dataplane_transfer_queue import BaseSampler  # noqa: E402
from dataplane_transfer_queue.sampler import get_seqlen_balanced_partitions  # noqa: E402
from tests import cluster  # noqa: E402
from tests.integrations import transfer_queue_calls  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = HERE / "transfer_queue_0.1.11.json"
OURS = "dataplane_transfer_queue"
DIFFERENCES = {
    "position_ids_of_equal_lengths_keep_their_ragged_dimension": "ragged dimension",
    "a_key_that_is_absent_among_others": "absent keys",
    "an_empty_meta_needs_no_arguments": "`BatchMeta()`",
    "keys_and_numbers_are_one_row": "empty `BatchMeta` has no fields",
    "a_group_is_of_one_prompt": "two prompts",
}
"""Scenarios that differ, and the words by which one of `PAGES` lists why."""
PAGES = ("docs/verl.md", "packages/dataplane-transfer-queue/README.md")
USED_S = 300


def play(module: str, **environment: str) -> dict[str, Any]:
    """What the module gives, in a process of its own."""
    command = [sys.executable, "-m", "tests.integrations.transfer_queue_calls", module]
    played = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=USED_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert played.returncode == 0, played.stderr[-3000:]
    (line,) = [line for line in played.stdout.splitlines() if line.startswith("RESULTS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULTS "))
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:  # paths of sockets are short
        return play(OURS, DATAPLANE_RUN_DIR=folder, DATAPLANE_ARENA="64MiB")


@pytest.mark.timeout(2 * USED_S)
@pytest.mark.parametrize("name", transfer_queue_calls.SCENARIOS)
def test_the_same_calls_give_the_same(name: str, ours: dict[str, Any]) -> None:
    theirs = json.loads(RECORD.read_text())
    if name in DIFFERENCES:
        assert ours[name] != theirs[name], "it differs no more: list it no more"
        assert any(DIFFERENCES[name] in (ROOT / page).read_text() for page in PAGES)
    else:
        assert ours[name] == theirs[name]


@pytest.mark.compare
@pytest.mark.timeout(2 * USED_S)
def test_the_record_is_what_transfer_queue_gives() -> None:
    try:
        installed = importlib.metadata.version("TransferQueue")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("TransferQueue is not installed: `make test-compare` installs it")
    assert installed == "0.1.11"
    assert play("transfer_queue", TQ_NUM_THREADS="1") == json.loads(RECORD.read_text())


# what the record cannot show


@pytest.fixture
def plane(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first `init` starts a peer, which ends soon after the last `close`."""
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")


@pytest.fixture
def tq(plane: None) -> Iterator[Any]:
    transfer_queue.init({"controller": {"polling_mode": True}})
    yield transfer_queue
    transfer_queue.close()


def rows(count: int) -> Any:
    return tensordict.TensorDict({"x": torch.arange(count)}, count)


def test_differences_that_are_right_are_as_docs_say(ours: dict[str, Any]) -> None:
    name = "position_ids_of_equal_lengths_keep_their_ragged_dimension"
    assert ours[name]["position_ids"]["in"] == 2
    assert ours["a_key_that_is_absent_among_others"] == {"error": ["ValueError", "KeyError"]}
    assert ours["an_empty_meta_needs_no_arguments"]["size"] == 0
    assert ours["a_group_is_of_one_prompt"] == [[4, 5], [4, 5]]


def test_an_array_of_texts_or_objects_has_an_entry_for_each_row(tq: Any) -> None:
    chats = numpy.empty(2, object)
    chats[:] = [{"role": "user"}, {"role": "user", "names": numpy.array([["a"], ["bc"]])}]
    names = tensordict.NonTensorStack(*numpy.array(["c", "d"]))
    columns = {"bytes": numpy.array([b"x", b"yz"]), "chat": chats, "name": names}
    tq.kv_batch_put(["a", "b"], "train", tensordict.TensorDict(columns, 2))
    got = tq.kv_batch_get(["b", "a"], "train")
    assert got["bytes"].tolist() == [b"yz", b"x"]
    assert got["name"].tolist() == ["d", "c"]
    first, second = got["chat"].tolist()
    assert second == {"role": "user"} and first["names"].dtype == "<U2"
    assert first["names"].tolist() == [["a"], ["bc"]]


def test_other_clients_go_on_where_a_checkpoint_was_loaded(tq: Any, tmp_path: Path) -> None:
    other = transfer_queue.attach()
    tq.kv_batch_put(["a", "b"], "train", rows(2))
    tq.save_checkpoint(tmp_path / "saved")
    tq.kv_clear("a", "train")
    assert list(other.kv_list("train")["train"]) == ["b"]
    tq.load_checkpoint(tmp_path / "saved")
    assert sorted(other.kv_list("train")["train"]) == ["a", "b"]
    assert other.kv_get(["a"], "train", None)["x"].tolist() == [0]
    other.close()


def test_a_meta_that_ray_brought_takes_fields() -> None:
    """Its arrays lie in Ray's store, and are read-only."""
    meta = transfer_queue.BatchMeta([0, 1], ["p", "p"])
    outside: list[Any] = []
    told = pickle.dumps(meta, protocol=5, buffer_callback=outside.append)
    brought = pickle.loads(told, buffers=[bytes(buffer) for buffer in outside])  # noqa: S301
    assert not brought.production_status.flags.writeable
    assert brought.union(brought).size == 2 and not brought.is_ready
    assert brought.add_fields(rows(2)).is_ready and brought.field_names == ["x"]


@pytest.mark.parametrize(("weights", "lists", "equal"), [([1, 2, 3], 2, True), ([1], 3, False)])
def test_weights_that_make_no_lists_raise_as_they_do_there(
    weights: list[int], lists: int, equal: bool
) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=f"{len(weights)} weights cannot be split"):
            get_seqlen_balanced_partitions(weights, lists, equal)


def test_equal_objects_with_media_are_stored_once(tq: Any) -> None:
    media = torch.arange(1 << 18, dtype=torch.float32)
    same = [{"pixel_values": media.clone(), "n": i // 4} for i in range(8)]
    put = tensordict.TensorDict({"multi_modal_inputs": tensordict.NonTensorStack(*same)}, 8)
    keys = [f"u_{i}_0" for i in range(8)]
    tq.kv_batch_put(keys, "train", put)
    used = tq.get_client()._store.plane.stats()["arena"]["used_bytes"]
    assert 2 * media.nbytes <= used < 3 * media.nbytes
    got = tq.kv_batch_get(keys, "train")["multi_modal_inputs"].tolist()
    assert [one["n"] for one in got] == [0] * 4 + [1] * 4
    assert all(torch.equal(one["pixel_values"], media) for one in got)


@pytest.mark.parametrize("mode", ["RGB", "P", "1", "I;16"])
def test_pictures_in_a_prompts_messages_come_back_as_pictures(tq: Any, mode: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="make test installs it")
    noise = image.effect_noise((40, 30), 80)
    picture = noise.convert("RGB").quantize(8) if mode == "P" else noise.convert(mode)
    if mode in ("RGB", "P"):  # the color that a PNG shows as transparent
        picture.info["transparency"] = (1, 2, 3) if mode == "RGB" else bytes([0, 255])
    messages = [[{"role": "user", "content": [{"type": "image", "image": picture}]}]] * 2
    column = tensordict.NonTensorStack(*messages)
    tq.kv_batch_put(["a", "b"], "train", tensordict.TensorDict({"raw_prompt": column}, 2))
    for one in tq.kv_batch_get(["a", "b"], "train")["raw_prompt"].tolist():
        got = one[0]["content"][0]["image"]
        assert isinstance(got, image.Image) and got.mode == mode and got.size == (40, 30)
        assert got.tobytes() == picture.tobytes() and got.getpalette() == picture.getpalette()
        assert got.info.get("transparency") == picture.info.get("transparency")


def test_rows_are_seen_by_whoever_sees_the_tag_that_says_so(tq: Any) -> None:
    done = threading.Event()

    def work() -> None:
        for uid in range(30):
            tq.kv_put(f"{uid}", "train", tag={"status": "running"})
            for index in range(4):
                tq.kv_batch_put([f"{uid}_0_{index}"], "train", rows(1))
            tq.kv_put(f"{uid}", "train", tag={"status": "finished"})
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        seen = tq.kv_list().get("train", {})
        for key, tags in seen.items():
            if tags.get("status") == "finished":
                assert all(f"{key}_0_{index}" in seen for index in range(4))
    worker.join()


def test_numbers_are_a_partitions_number_and_a_rows(tq: Any) -> None:
    client = tq.get_client()
    one, two = (client.put(rows(3), partition_id=name) for name in ("one", "two"))
    assert one.global_indexes == [0, 1, 2]
    assert two.global_indexes == [(1 << 32) + row for row in range(3)]
    tq.kv_put("k", "two", {"x": torch.tensor(1)})
    meta = client.kv_retrieve_meta("k", "two")
    assert meta.global_indexes == [(1 << 32) + 3]
    assert client.kv_retrieve_keys(meta.global_indexes, "two") == ["k"]
    client.clear_partition("one")
    again = client.put(rows(1), partition_id="one")
    assert again.global_indexes == [3]


def test_rows_put_after_a_clear_are_found_by_every_process(tq: Any) -> None:
    """Also where others put while it was cleared, and so created it again."""
    cleared, putting, reader = tq.get_client(), tq.attach(), tq.attach()
    try:
        for turn in range(20):
            going = threading.Event()

            def put_until_cleared(going: threading.Event = going) -> None:
                while not going.is_set():
                    putting.put(rows(1), partition_id="train")

            worker = threading.Thread(target=put_until_cleared)
            worker.start()
            cleared.clear_partition("train")
            going.set()
            worker.join()
            put = putting.put(rows(1), partition_id="train")
            assert reader.get_data(put.select_fields(["x"]))["x"].tolist() == [0], turn
    finally:
        putting.close()
        reader.close()


def test_another_process_reads_more_rows_than_a_filter_has_parts(tq: Any) -> None:
    numbered = tq.get_client().put(rows(300), partition_id="numbered")
    tq.kv_batch_put([f"k{i}" for i in range(300)], "keyed", rows(300))
    keyed = tq.get_client().get_meta(["x"], 300, "keyed", mode="force_fetch")
    other = tq.attach()  # it has read no key yet
    try:
        for meta in (numbered, keyed):
            assert sorted(other.get_data(meta)["x"].tolist()) == list(range(300))
        other.clear_samples(keyed)
        assert tq.kv_list("keyed") == {"keyed": {}}
    finally:
        other.close()


def test_many_fetch_at_once_and_each_row_is_fetched_once(tq: Any) -> None:
    client = tq.get_client()
    client.put(rows(40), partition_id="train")
    seen: list[int] = []

    def fetch() -> None:
        while (meta := client.get_meta(["x"], 4, "train", task_name="t")).size:
            seen.extend(meta.global_indexes)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(40))


class Index(int):
    """An index of a row. `when_hashed` runs where it is looked up."""

    when_hashed = staticmethod(lambda: None)

    def __hash__(self) -> int:
        self.when_hashed()
        return int.__hash__(self)


def test_a_thread_finds_keys_that_another_one_forgets_meanwhile(
    tq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of keys is cleared when it is full, by whichever thread finds it so."""
    monkeypatch.setattr("dataplane_transfer_queue.store._REMEMBERED", 3)
    client = tq.get_client()
    mine, others = ([f"{name}{n}" for n in range(8)] for name in "ab")
    tq.kv_batch_put(mine + others, "train", rows(16))
    indexes = [Index(one) for one in client.kv_retrieve_meta(mine, "train").global_indexes]
    forgets = threading.Thread(target=client.kv_retrieve_meta, args=[others, "train"])

    def forget() -> None:
        Index.when_hashed = staticmethod(lambda: None)
        forgets.start()
        forgets.join(0.5)  # where it may not yet, it waits for this thread

    monkeypatch.setattr(Index, "when_hashed", staticmethod(forget))
    assert client.kv_retrieve_keys(indexes, "train") == mine
    forgets.join()
    assert client.kv_retrieve_keys(list(map(int, indexes)), "train") == mine


def test_threads_that_forget_all_keys_at_once_find_their_own(
    tq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane_transfer_queue.store._REMEMBERED", 3)
    client = tq.get_client()
    names = [[f"{thread}-{n}" for n in range(8)] for thread in range(4)]
    for keys in names:
        tq.kv_batch_put(keys, "train", rows(8))

    def look(keys: list[str]) -> list[list[str]]:
        indexes = client.kv_retrieve_meta(keys, "train").global_indexes
        return [client.kv_retrieve_keys(indexes, "train") for _ in range(12)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, names)) == [[keys] * 12 for keys in names]


CHILD = """
import sys, torch
from tensordict import TensorDict
import dataplane_transfer_queue as tq
tq.init()
client = tq.get_client()
config = {"dp_rank": int(sys.argv[1]), "batch_index": 0}
meta = client.get_meta(["x"], 2, "train", task_name="t", sampling_config=config)
print(meta.global_indexes)
tq.close()
"""


def fetched_elsewhere(rank: int) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(rank)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[int] = json.loads(done.stdout)
    return found


def fetched_here(rank: int) -> list[int]:
    config = {"dp_rank": rank, "batch_index": 0}
    client = transfer_queue.get_client()
    meta = client.get_meta(["x"], 2, "train", task_name="t", sampling_config=config)
    return list(meta.global_indexes)


class EveryOther(BaseSampler):
    """A user's own, which remembers by itself."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        taken = ready_indexes[self.first :: 2][:batch_size]
        return taken, taken


class Lucky(BaseSampler):
    """As TransferQueue's tutorial makes one: with replacement, from generators that it keeps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._states["rng"] = numpy.random.RandomState(seed)
        self.more = [numpy.random.default_rng(seed), random.Random(seed)]
        self.had: tuple[Any, ...] = ()

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        luck = [self._states["rng"], *self.more]
        taken = [int(one.choice(ready_indexes)) for one in luck]
        self.had = (*self.had, taken)
        return sorted({*taken, len(self.had)}), []


def test_ranks_of_several_processes_share_what_the_sampler_remembers(
    plane: None,
) -> None:
    transfer_queue.init(
        {"controller": {"polling_mode": True, "sampler": transfer_queue.RankAwareSampler}}
    )
    try:
        transfer_queue.get_client().put(rows(4), partition_id="train")
        assert fetched_elsewhere(0) == [0, 1]
        here = [fetched_here(rank) for rank in (1, 0)]
        assert here == [[2, 3], [0, 1]]
        transfer_queue.get_client().put(rows(1), partition_id="train")
        assert transfer_queue.kv_list() == {"train": {}}  # a child's close ended nothing
    finally:
        transfer_queue.close()


def test_what_a_sampler_remembers_survives_the_host_of_the_process_that_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATAPLANE_RUN", "test")
    monkeypatch.setenv("DATAPLANE_PEER", "a")
    large = tensordict.TensorDict({"x": torch.zeros(1, 5_000)}, 1)
    fetch: dict[str, Any] = {"task_name": "t", "sampling_config": {"dp_rank": 0, "batch_index": 0}}
    with cluster.running(["a", "b"], "test", "64MiB") as peers:
        transfer_queue.init({"controller": {"sampler": transfer_queue.RankAwareSampler}})
        try:
            client = transfer_queue.get_client()
            monkeypatch.setenv("DATAPLANE_PEER", "b")
            far = transfer_queue.attach()
            far.kv_put(["big"], "lost", large, None)
            client.put(rows(400), partition_id="train")  # of the second partition: long numbers
            had = far.get_meta(["x"], 200, "train", **fetch)
            peers.kill("b")
            with pytest.raises(dataplane.PeerLost):
                far.get_data(had)
            with contextlib.suppress(dataplane.PeerLost):
                far.close()
            again = client.get_meta(["x"], 200, "train", **fetch)
            assert again.global_indexes == had.global_indexes
            assert client.get_data(again)["x"].tolist() == list(range(200))
            with pytest.raises(KeyError, match="lost with a peer"):
                client.kv_get("big", "lost", None)
        finally:
            transfer_queue.close()


def test_a_sampler_of_the_users_own_is_asked(
    plane: None,
) -> None:
    transfer_queue.init({"controller": {"polling_mode": True, "sampler": EveryOther(1)}})
    try:
        client = transfer_queue.get_client()
        client.put(rows(6), partition_id="train")
        taken = [client.get_meta(["x"], 3, "train", task_name="t").global_indexes for _ in "ab"]
        assert taken == [[1, 3, 5], [2]]  # of 0, 2 and 4, which were left
    finally:
        transfer_queue.close()


def test_a_sampler_has_the_attributes_that_it_left(plane: None) -> None:
    wanted, ready = Lucky(7), list(range(100))
    transfer_queue.init({"controller": {"polling_mode": True, "sampler": Lucky(7)}})
    try:
        client = transfer_queue.get_client()
        client.put(rows(100), partition_id="train")
        for _ in range(3):
            meta = client.get_meta(["x"], 1, "train", task_name="t")
            assert meta.global_indexes == wanted.sample(ready, 1)[0]
    finally:
        transfer_queue.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_who_began_the_queue_ends_it(plane: None) -> None:
    with pytest.raises(RuntimeError, match="call init"):
        transfer_queue.kv_list()
    for _ in range(2):
        transfer_queue.close()
        conf = transfer_queue.init(
            {"backend": {"storage_backend": "MooncakeStore"}, "unheard": {"of": 1}}
        )
        assert conf is not None and not isinstance(conf, dict) and conf.unheard.of == 1
        assert transfer_queue.kv_list() == {}
        transfer_queue.kv_put("a", "train", {"x": torch.tensor([1])})
    child = os.fork()
    if not child:
        told = transfer_queue.kv_list()
        transfer_queue.close()
        os._exit(told != {"train": {"a": {}}})
    assert os.waitpid(child, 0)[1] == 0 and list(transfer_queue.kv_list()["train"]) == ["a"]
    transfer_queue.close()


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"controller": {"sampler": "NoSuchSampler"}}, "of a sampler, not 'NoSuchSampler'"),
        ({"controller": {"sampler": 5}}, "controller.sampler must be the name"),
    ],
)
def test_a_sampler_that_is_none_is_refused(conf: Any, why: str, plane: None) -> None:
    with pytest.raises(ValueError, match=why):
        transfer_queue.init(conf)
    transfer_queue.close()


def test_a_dataset_may_have_a_configuration_that_is_not_of_ours(tq: Any) -> None:
    tq.get_client().put(rows(2), partition_id="train")
    struct = omegaconf.OmegaConf.create({"backend": {}})
    omegaconf.OmegaConf.set_struct(struct, True)  # as hydra gives it
    for conf in (None, {"controller": {"polling_mode": True}}, struct):
        dataset = tq.StreamingDataset(conf, 2, 2, ["x"], "train", f"{conf}", 0, True)
        assert [batch["x"].tolist() for batch, _ in dataset] == [[0, 1]]


def test_what_the_plane_cannot_carry_is_named_before_anything_is_put(tq: Any) -> None:
    odd = tensordict.TensorDict({"o": tensordict.NonTensorStack({"a": [object()]})}, 1)
    with pytest.raises(Exception, match=r'o\[0\].*\["a"\]\[0\]'):
        transfer_queue.kv_batch_put(["k"], "train", odd)
    with pytest.raises(TypeError, match="tag 't' is a object"):
        transfer_queue.kv_put("k", "train", tag={"t": object()})
    assert transfer_queue.kv_list("train").get("train", {}) == {}


def test_mistakes_are_told_before_anything_is_put(tq: Any) -> None:
    two: list[Any] = ["a", "b"]
    with pytest.raises(TypeError, match="keys must be a list of str, not 'ab'"):
        tq.kv_batch_put("ab", "train", rows(2))
    with pytest.raises(ValueError, match="at least one key"):
        tq.kv_batch_put([], "train", rows(0))
    with pytest.raises(TypeError, match="the name of a partition must be a str, not 7"):
        tq.kv_batch_put(two, 7, rows(2))
    with pytest.raises(TypeError, match="the name of a tag must be a str, not 1"):
        tq.kv_batch_put(two, "train", rows(2), [{"t": 0}, {1: 2}])
    with pytest.raises(TypeError, match="tags must be one dict per row, not a str"):
        tq.kv_batch_put(two, "train", rows(2), ["t", "u"])
    with pytest.raises(TypeError, match="tag 't' is a object"):
        tq.kv_batch_put(two, "train", rows(2), [{}, {"t": object()}])
    assert tq.kv_list("train").get("train", {}) == {}


def test_rows_of_two_kinds_come_back_as_they_were_put(tq: Any) -> None:
    columns = {
        "all": tensordict.NonTensorData([1, 2, 3]),
        "each": tensordict.NonTensorStack(torch.arange(2), torch.ones(1)),
        "numbers": tensordict.NonTensorData(numpy.arange(2)),
    }
    tq.kv_batch_put(["a", "b"], "train", tensordict.TensorDict(columns, 2))
    got = tq.kv_batch_get(["b", "a"], "train")
    assert got["all"].tolist() == [[1, 2, 3]] * 2
    assert [one.dtype for one in got["each"].tolist()] == [torch.float32, torch.int64]
    assert [type(one) for one in got["numbers"].tolist()] == [numpy.int64] * 2


def test_the_shim_is_the_module_under_transfer_queues_name() -> None:
    package = ROOT / "packages" / "dataplane-as-transfer-queue"
    script = (
        "import transfer_queue as tq, transfer_queue.metadata as m; "
        "from transfer_queue.utils.logging_utils import get_logger; "
        "get_logger('user', 'INFO').info('seen'); "
        "assert tq.BatchMeta is m.BatchMeta; print(tq.__version__, tq.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stderr.endswith("INFO user: seen\n"), done.stderr
    version, file = done.stdout.split()
    assert tuple(map(int, version.split("."))) >= (0, 1, 9) and file.startswith(str(package))


def test_a_field_that_only_some_rows_have_is_named(tq: Any) -> None:
    rows = [tensordict.TensorDict({"x": torch.ones(1), "y": torch.ones(1)}, []) for _ in range(2)]
    del rows[1]["y"]
    with pytest.raises(ValueError, match="row 0 has field 'y', but row 1 does not"):
        tq.kv_batch_put(["a", "b"], "train", tensordict.lazy_stack(rows))


@pytest.mark.parametrize(
    "tag", [(1, 2), {1: 2}, [{"a": (1,)}], numpy.datetime64(1, "ns"), numpy.timedelta64(1, "D")]
)
def test_a_tag_that_would_come_back_as_another_is_refused(tag: Any, tq: Any) -> None:
    fields = rows(1)
    with pytest.raises(TypeError, match="tag 't' is"):
        tq.kv_batch_put(["a"], "train", fields, tags=[{"t": tag}])
