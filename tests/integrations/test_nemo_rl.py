"""NeMo-RL's `DataPlaneClient`: its methods, in a driver and workers that are processes.

NeMo-RL is not on PyPI; the signatures are those of github.com/NVIDIA-NeMo/RL,
nemo_rl/data_plane/interfaces.py, in November 2026.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types
from abc import ABC
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict", reason="make test installs it")
pytest.importorskip("omegaconf", reason="make test installs it")
pytest.importorskip("dataplane_transfer_queue", reason="make test installs it")

from dataplane_transfer_queue.nemo_rl import DataPlaneClient, KVBatchMeta  # noqa: E402
from tests.end_to_end.conftest import line  # noqa: E402
from tests.processes import all_ending  # noqa: E402

ROOT = Path(__file__).parents[2]
BOUNDARY = {
    "register_partition": "partition_id fields num_samples consumer_tasks grpo_group_size enums",
    "claim_meta": ("partition_id task_name required_fields batch_size dp_rank blocking timeout_s"),
    "get_data": "meta select_fields",
    "check_consumption_status": "partition_id task_names",
    "put_samples": "sample_ids partition_id fields tags",
    "get_samples": "sample_ids partition_id select_fields",
    "clear_samples": "sample_ids partition_id",
    "list_sample_ids": "partition_id",
    "save_checkpoint": "checkpoint_dir metadata",
    "load_checkpoint": "checkpoint_dir",
    "close": "",
}
WORKER = """
import json, sys
import torch
from tensordict import TensorDict
from dataplane_transfer_queue.nemo_rl import DataPlaneClient

client = DataPlaneClient({}, bootstrap=False)
for _ in sys.stdin:
    meta = client.claim_meta("train", "logprobs", ["input_ids"], 4, timeout_s=60)
    rows = client.get_data(meta)["input_ids"].unbind()
    given = torch.nested.as_nested_tensor([row * 0.5 for row in rows], layout=torch.jagged)
    client.put_samples(meta.sample_ids, "train", TensorDict({"prev_logprobs": given}, [4]))
    told = [meta.sample_ids, meta.sequence_lengths, [tags["uid"] for tags in meta.tags]]
    print(json.dumps(told), flush=True)
client.close()
"""


@pytest.fixture
def client(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlaneClient]:
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")
    monkeypatch.setenv("DATAPLANE_RUN", "nemo")
    made = DataPlaneClient({"enabled": True, "impl": "dataplane", "dedup": ["pixel_values"]})
    made.register_partition("train", ["input_ids", "prev_logprobs"], 8, ["logprobs", "train"])
    yield made
    made.close()


def jagged(*lengths: int) -> Any:
    rows = [torch.arange(n) for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(**columns: Any) -> Any:
    return tensordict.TensorDict(columns, [len(next(iter(columns.values())))])


@pytest.mark.parametrize("name", BOUNDARY)
def test_a_method_takes_what_nemo_rls_takes(name: str) -> None:
    taken = inspect.signature(getattr(DataPlaneClient, name)).parameters
    assert " ".join(taken).removeprefix("self").strip() == BOUNDARY[name]


def test_a_step_goes_through_two_workers_and_the_next_one_uses_the_same_names(
    client: DataPlaneClient,
) -> None:
    ids = [f"u{prompt}_g{sample}" for prompt in range(2) for sample in range(4)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    with all_ending(workers):
        for _ in range(2):
            for worker in workers:
                print("a step", file=worker.stdin, flush=True)
            client.register_partition("train", ["input_ids"], 8, ["logprobs", "train"], 4)
            tags = [{"input_lengths": n, "uid": id} for n, id in enumerate(ids, 1)]
            fields = batch(input_ids=jagged(*range(1, 9)))
            put = client.put_samples(ids, "train", fields, tags)
            assert put.size == 8 and put.fields == ["input_ids"] and put.tags == tags
            told = [json.loads(line(worker)) for worker in workers]
            claimed = [id for ids, _, _ in told for id in ids]
            assert sorted(claimed) == ids and all(len(ids) == 4 for ids, _, _ in told)
            assert sorted(sum((lengths for _, lengths, _ in told), [])) == list(range(1, 9))
            assert all(ids == uids for ids, _, uids in told)

            assert client.check_consumption_status("train", ["logprobs"])
            assert not client.check_consumption_status("train", ["logprobs", "train"])
            meta = client.claim_meta("train", "train", ["input_ids", "prev_logprobs"], 8)
            data = client.get_data(meta, ["prev_logprobs"])
            lengths = [ids.index(id) + 1 for id in meta.sample_ids]
            assert data["prev_logprobs"].offsets().diff().tolist() == lengths
            assert client.check_consumption_status("train", ["logprobs", "train"])
            client.clear_samples(None, "train")
            assert client.list_sample_ids("train") == []
        for worker in workers:
            worker.communicate(timeout=30)
            assert worker.returncode == 0


def test_what_is_of_one_shape_comes_back_dense_and_objects_as_they_were(
    client: DataPlaneClient,
) -> None:
    chats = [{"role": "user", "n": [1, 2.5, None]}, {"role": "user", "n": []}]
    fields = batch(
        mask=torch.ones(2, 3, dtype=torch.bool),
        reward=torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
        even=jagged(4, 4),
        content=tensordict.NonTensorStack(*chats),
    )
    client.put_samples(["a", "b"], "train", fields)
    found = client.get_samples(["b", "a"], "train", ["mask", "reward", "even", "content"])
    assert found["mask"].shape == (2, 3) and not found["even"].is_nested
    assert torch.equal(found["reward"], fields["reward"].flip(0))
    assert found.get("content").tolist() == chats[::-1]
    assert client.get_samples([], "train", ["mask"]).batch_size == (0,)


def test_the_media_of_a_group_are_stored_once(client: DataPlaneClient) -> None:
    pixels = torch.rand(1, 1 << 18).expand(8, -1)
    client.put_samples([f"s{n}" for n in range(8)], "train", batch(pixel_values=pixels))
    assert client._store.plane.stats()["arena"]["used_bytes"] < 2 * pixels[0].nbytes


def test_what_is_not_there_is_said_in_nemo_rls_errors(client: DataPlaneClient) -> None:
    client.put_samples(["a"], "train", batch(x=torch.ones(1)))
    with pytest.raises(KeyError):
        client.get_samples(["a", "nobody"], "train", ["x"])
    with pytest.raises(KeyError):
        client.get_samples(["a"], "train", ["nothing"])
    with pytest.raises(ValueError, match="no fields to read"):
        client.get_data(KVBatchMeta("train", None, ["a"]))
    with pytest.raises(TimeoutError, match="2 wanted"):
        client.claim_meta("train", "read", ["x"], 2, timeout_s=0.2)
    assert client.claim_meta("train", "read", ["y"], 2, blocking=False).size == 0
    assert client.claim_meta("train", "read", ["x"], 2, blocking=False).sample_ids == ["a"]
    assert not client.check_consumption_status("elsewhere", ["read"])
    with pytest.warns(RuntimeWarning, match="no samples"):
        client.clear_samples(None, "elsewhere")
    client.clear_samples(["a", "nobody"], "train")
    assert client.list_sample_ids("train") == []
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="no process has started a queue"):
        DataPlaneClient(bootstrap=False)


def test_a_checkpoint_has_the_samples_and_who_claimed_them(
    client: DataPlaneClient, tmp_path: Path
) -> None:
    client.put_samples(["a", "b", "c"], "train", batch(x=torch.arange(3)))
    first = client.claim_meta("train", "train", ["x"], 1)
    client.save_checkpoint(tmp_path / "step-7", metadata={"step": 7})
    with pytest.raises(RuntimeError, match="before every other call of this client"):
        client.load_checkpoint(tmp_path / "step-7")
    client.close()
    again = DataPlaneClient()
    assert again.load_checkpoint(tmp_path / "step-7") == {"step": 7}
    rest = again.claim_meta("train", "train", ["x"], 2)
    assert sorted(first.sample_ids + rest.sample_ids) == ["a", "b", "c"]
    again.put_samples(["a"], "train", batch(x=torch.tensor([9])))
    assert again.get_samples(["a"], "train", ["x"])["x"].tolist() == [9]
    again.close()


def test_in_a_process_of_nemo_rl_metas_are_of_its_own_class(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces: Any = types.ModuleType("nemo_rl.data_plane.interfaces")
    interfaces.DataPlaneClient = type("DataPlaneClient", (ABC,), {})
    names = list(inspect.signature(KVBatchMeta).parameters)
    interfaces.KVBatchMeta = make_dataclass("KVBatchMeta", [(n, Any, None) for n in names])
    monkeypatch.setitem(sys.modules, interfaces.__name__, interfaces)
    meta = client.put_samples(["a"], "train", batch(x=torch.ones(1)))
    assert type(meta) is interfaces.KVBatchMeta and meta.sample_ids == ["a"] and meta.tags == [{}]
    assert isinstance(DataPlaneClient(bootstrap=False), interfaces.DataPlaneClient)
