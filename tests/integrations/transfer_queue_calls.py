"""Calls of TransferQueue's users, played on a module: `python -m … MODULE` prints what each gave.

Each scenario is a function of the module; what it returns is told as plain JSON, an error as its
kind. Numbers of rows are told as places among those of the scenario: nobody relies on more.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle  # noqa: S403
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

SCENARIOS: dict[str, Callable[[Any, str], Any]] = {}
CONFIGURATION: dict[str, Any] = {
    "backend": {"SimpleStorage": {"total_storage_size": 1000, "num_data_storage_units": 1}},
    "controller": {"polling_mode": True},
}


def scenario(call: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    SCENARIOS[call.__name__] = call
    return call


def told(value: Any) -> Any:
    """As plain JSON."""
    if isinstance(value, TensorDict):
        locked = {"locked": True} if value.is_locked else {}
        return {"rows": list(value.batch_size), **locked} | {
            name: told(column) for name, column in sorted(value.items())
        }
    if isinstance(value, torch.Tensor):
        if value.is_nested and value.layout == torch.jagged:
            rows = [part.tolist() for part in value.unbind()]
            return {"jagged": rows, "dtype": str(value.dtype), "in": value._ragged_idx}  # type: ignore[attr-defined]
        if value.is_nested:
            return {"strided": [part.tolist() for part in value.unbind()]}
        return {"dense": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, NonTensorStack):
        return {"objects": [told(one) for one in value.tolist()]}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if hasattr(value, "keys") and hasattr(value, "partition_id"):  # KVBatchMeta
        meta = {name: told(getattr(value, name)) for name in ("keys", "tags", "extra_info")}
        return meta | {"fields": sorted(value.fields or ()), "partition": value.partition_id}
    if hasattr(value, "global_indexes"):  # BatchMeta
        return {
            "size": value.size,
            "fields": sorted(value.field_names),
            "ready": value.is_ready,
            "status": value.production_status.tolist(),
            "tags": told(value.custom_meta),
            "extra_info": told(value.extra_info),
        }
    if isinstance(value, dict):
        return {str(key): told(one) for key, one in sorted(value.items(), key=lambda i: str(i[0]))}
    if isinstance(value, list | tuple | set):
        return [told(one) for one in value]
    return value


def error(call: Callable[[], Any]) -> Any:
    """What a call gives, or the kinds of its error that callers may catch."""
    try:
        return told(call())
    except Exception as exc:
        kinds = (ValueError, TypeError, KeyError, IndexError, TimeoutError, RuntimeError)
        return {"error": [kind.__name__ for kind in kinds if isinstance(exc, kind)]}


def numbers(rows: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + rows * 2).reshape(rows, 2)}, rows)


def jagged(*lengths: int) -> torch.Tensor:
    rows = [torch.arange(length) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


# rows by key


@scenario
def rows_come_back_in_the_order_asked_for(tq: Any, p: str) -> Any:
    put = tq.kv_batch_put(["a", "b", "c"], p, numbers(3))
    return put, tq.kv_batch_get(["c", "a"], p), tq.kv_batch_get("b", p)


@scenario
def scalars_are_dense_and_all_else_is_jagged(tq: Any, p: str) -> Any:
    fields = {
        "scalar": torch.tensor([1.5, 2.5]),
        "equal": torch.ones(2, 3, dtype=torch.int64),
        "ragged": jagged(1, 4),
        "matrix": torch.zeros(2, 2, 2),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
    }
    tq.kv_batch_put(["a", "b"], p, TensorDict(fields, 2))
    got = tq.kv_batch_get(["a", "b"], p)
    return got, got["equal"].offsets().tolist()


@scenario
def what_was_got_may_be_changed(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, TensorDict({"s": torch.ones(2), "x": torch.ones(2, 2)}, 2))
    got = tq.kv_batch_get(["a", "b"], p)
    got["s"] += 1
    got["new"] = torch.zeros(2)
    popped = got.pop("x")
    return got, popped, got[0]["s"].item(), tq.kv_batch_get(["a", "b"], p)


@scenario
def objects_stay_what_they_are(tq: Any, p: str) -> Any:
    media = {"pixel_values": torch.ones(3, 4), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    values = [{"ids": [1, 2, 3], "text": "ü", "none": None, "t": 1.5}, {"ids": [], "media": media}]
    columns = {"o": NonTensorStack(*values), "raw_prompt_ids": NonTensorStack([1, 2], [3])}
    tq.kv_batch_put(["a", "b"], p, TensorDict(columns, 2))
    got = tq.kv_batch_get(["a", "b"], p)
    first, second = got["o"].tolist()
    kinds = [type(first["ids"]).__name__, type(second["media"]["pixel_values"]).__name__]
    return got, kinds, got["raw_prompt_ids"].tolist(), got[0]["raw_prompt_ids"]


@scenario
def one_row_is_put_by_a_dict(tq: Any, p: str) -> Any:
    fields = {"ids": torch.tensor([1, 2, 3]), "score": torch.tensor(0.5), "text": "hello"}
    put = tq.kv_put("a", p, fields, {"status": "finished", "n": None})
    return put, tq.kv_batch_get("a", p), tq.kv_list(p)[p]


@scenario
def tags_are_merged_and_come_back_with_all_fields(tq: Any, p: str) -> Any:
    first = tq.kv_batch_put(["a", "b"], p, numbers(2), [{"s": 1, "k": None}, {"s": 2}])
    more = TensorDict({"y": torch.ones(1)}, 1)
    second = tq.kv_batch_put(["a"], p, more, [{"s": 9, "new": "x"}])
    both = tq.kv_batch_put(["a", "b"], p, tags=[{"l": [1, {"m": 2}]}, {"f": 0.5, "b": True}])
    return first, second, both, tq.kv_list(p)[p]


@scenario
def a_row_may_have_tags_and_nothing_else(tq: Any, p: str) -> Any:
    put = tq.kv_put("uid", p, tag={"status": "pending", "is_prompt": True})
    again = tq.kv_put("uid", p, tag={"status": "finished"})
    none = error(lambda: tq.kv_batch_get("uid", p))
    selected = error(lambda: tq.kv_batch_get("uid", p, "x"))
    return put, again, tq.kv_list(p)[p], none, selected


@scenario
def a_field_is_overwritten_with_another_length(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, TensorDict({"x": jagged(2, 3)}, 2))
    tq.kv_batch_put(["a"], p, TensorDict({"x": torch.ones(1, 5, dtype=torch.int64)}, 1))
    return tq.kv_batch_get(["a", "b"], p)


@scenario
def one_column_has_dense_and_jagged_puts(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, TensorDict({"x": torch.ones(2, 3, dtype=torch.int64)}, 2))
    tq.kv_batch_put(["c", "d"], p, TensorDict({"x": jagged(1, 4)}, 2))
    meta = tq.kv_put("a", p, tag={"t": 1})
    return tq.kv_batch_get(["d", "a", "c"], p), meta


@scenario
def position_ids_of_mrope_keep_their_ragged_dimension(tq: Any, p: str) -> Any:
    rows = [torch.arange(3 * n).reshape(3, n) for n in (2, 5)]
    column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(["a", "b"], p, TensorDict({"position_ids": column}, 2))
    return tq.kv_batch_get(["b", "a"], p)


@scenario
def position_ids_of_equal_lengths_keep_their_ragged_dimension(tq: Any, p: str) -> Any:
    values = torch.arange(3 * 8).reshape(3, 8)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 8]), jagged_dim=2)
    tq.kv_batch_put(["a", "b"], p, TensorDict({"position_ids": column}, 2))
    return tq.kv_batch_get(["a", "b"], p)


@scenario
def unknown_fields_vanish_and_only_common_ones_return(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a", "b"], p, numbers(2))
    tq.kv_put("a", p, {"y": torch.tensor([1])})
    both = tq.kv_batch_get(["a", "b"], p)
    some = tq.kv_batch_get(["a", "b"], p, ["x", "y", "nothing"])
    none = tq.kv_batch_get(["a"], p, select_fields="nothing")
    return both, some, none, tq.kv_batch_get("a", p)


@scenario
def clearing_and_listing_what_is_absent_is_quiet(tq: Any, p: str) -> Any:
    tq.kv_clear(["a"], f"{p}-nowhere")
    tq.kv_batch_put(["a", "b"], p, numbers(2))
    tq.kv_clear(["b", "zz"], p)
    tq.kv_clear("b", p)
    return tq.kv_list(f"{p}-nowhere"), tq.kv_list(p), p in tq.kv_list()


@scenario
def a_cleared_key_is_used_again(tq: Any, p: str) -> Any:
    gone = []
    for number in range(3):
        tq.kv_batch_put(["a", "b"], p, numbers(2, number), [{"n": number, f"t{number}": 1}] * 2)
        tq.kv_clear(["a"], p)
        gone.append("ValueError" in error(lambda: tq.kv_batch_get("a", p))["error"])
    tq.kv_put("a", p, {"y": torch.tensor([7])}, {"last": True})
    return gone, tq.kv_batch_get("a", p), tq.kv_batch_get("b", p), tq.kv_list(p)


@scenario
def a_key_that_is_absent_among_others(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a"], p, numbers(1))
    return error(lambda: tq.kv_batch_get(["a", "zz"], p))


@scenario
def all_keys_absent(tq: Any, p: str) -> Any:
    tq.kv_batch_put(["a"], p, numbers(1))
    one = error(lambda: tq.kv_batch_get(["zz"], p))
    return "ValueError" in one["error"], "error" in error(lambda: tq.kv_batch_get("a", f"{p}-no"))


@scenario
def a_batch_is_read_by_what_the_put_returned(tq: Any, p: str) -> Any:
    meta = tq.kv_batch_put(["a", "b"], p, numbers(2))
    meta.extra_info["temperature"] = 0.5
    other = pickle.loads(pickle.dumps(meta))  # noqa: S301
    whole, some = tq.kv_batch_get_by_meta(other), tq.kv_batch_get_by_meta(meta, "x")
    return other, whole, some, error(lambda: tq.kv_batch_get_by_meta(meta, ["x", "nothing"]))


@scenario
def mistakes_of_puts(tq: Any, p: str) -> Any:
    return [
        error(lambda: tq.kv_put("a", p)),
        error(lambda: tq.kv_put("a", p, {"x": jagged(1, 2)})),
        error(lambda: tq.kv_put("a", p, [1, 2])),
        error(lambda: tq.kv_batch_put(["a"], p)),
        error(lambda: tq.kv_batch_put(["a"], p, numbers(2))),
        error(lambda: tq.kv_batch_put(["a"], p, numbers(1), [{}, {}])),
        error(lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}]))),
    ]


def fetch(columns: dict[str, Any]) -> dict[str, Any]:
    columns["url"] = [f"content of {url}" for url in columns["url"]]
    columns["x"] = columns["x"] * 10
    return columns


@scenario
def a_parser_fills_in_what_references_stand_for(tq: Any, p: str) -> Any:
    columns = {"url": NonTensorStack("u1", "u2"), "x": torch.ones(2, 2)}
    tq.kv_batch_put(["a", "b"], p, TensorDict(columns, 2), data_parser=fetch)
    return tq.kv_batch_get(["a", "b"], p)


@scenario
def one_client_serves_several_loops_and_threads(tq: Any, p: str) -> Any:
    def work(number: int) -> None:
        async def rows() -> None:
            for i in range(4):
                await tq.async_kv_put(f"{number}-{i}", p, {"x": torch.tensor([number, i])})
            await tq.async_kv_batch_put([f"{number}-0"], p, tags=[{"done": number}])

        asyncio.run(rows())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def read() -> Any:
        keys = sorted((await tq.async_kv_list(p))[p])
        return keys, await tq.async_kv_batch_get(keys, p)

    return asyncio.run(read())


# metas


@scenario
def key_metas_are_cut_and_joined(tq: Any, p: str) -> Any:
    keys = ["a", "b", "c", "d", "e"]
    meta = tq.KVBatchMeta(keys, [{"n": i} for i in range(5)], p, ["x"], {"t": 1})
    parts = meta.chunk(3)
    more = meta.chunk(7)
    whole = tq.KVBatchMeta.concat(parts[::-1])
    whole.reorder([4, 3, 2, 1, 0])
    odd = tq.KVBatchMeta(["z"], [{}], p, ["y"])
    clash = tq.KVBatchMeta(["z"], [{}], p, ["x"], {"t": 2})
    return [
        parts,
        [len(part) for part in more],
        whole,
        meta.select_keys(["d", "a"]),
        tq.KVBatchMeta.concat([]),
        error(lambda: meta.select_keys(["zz"])),
        error(lambda: meta.reorder([0, 0, 1, 2, 3])),
        error(lambda: tq.KVBatchMeta.concat([meta, odd])),
        error(lambda: tq.KVBatchMeta.concat([meta, clash])),
        error(lambda: tq.KVBatchMeta(["a", "a"], [{}, {}])),
        error(lambda: tq.KVBatchMeta(["a"], [])),
    ]


@scenario
def metas_are_cut_and_joined(tq: Any, p: str) -> Any:
    def schema() -> Any:
        x = {"dtype": torch.int64, "shape": (2,), "is_nested": False, "is_non_tensor": False}
        y = {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}
        return {"x": x, "y": y | {"per_sample_shapes": [(i,) for i in range(5)]}}

    tags = [{"n": i} for i in range(5)]
    status = np.ones(5, np.int8)
    meta = tq.BatchMeta(list(range(5)), [p] * 5, schema(), status, {"t": 1}, tags)
    parts = meta.chunk(3)
    joined = tq.BatchMeta.concat(parts)
    few = meta.select_samples([4, 1])
    other = tq.BatchMeta([4, 1], [p] * 2, {}, np.ones(2, np.int8), {"u": 2}, [{"n": 9}, {}])
    both = few.union(other)
    ordered = meta.select_fields(["y", "nothing"])
    ordered.reorder([4, 3, 2, 1, 0])
    kept = pickle.loads(pickle.dumps(meta))  # noqa: S301
    kept.set_extra_info("k", 2)
    clash = meta.select_samples([0])
    clash.extra_info["t"] = 2
    mixed = tq.BatchMeta([0, 1], [p, f"{p}2"])
    return [
        parts,
        joined,
        few,
        [few.get_shapes("y"), few.get_shapes("x"), [str(d) for d in few.get_dtypes("x")]],
        both,
        ordered,
        [[s.global_index, dict(s.custom_meta), s.fields["y"]["shape"]] for s in ordered.samples],
        [kept.get_all_extra_info(), kept.has_extra_info("t"), kept.remove_extra_info("t")],
        [len(meta[1:3]), meta[-1].custom_meta, len(tq.BatchMeta.empty())],
        [part.partition_ids for part in mixed.chunk_by_partition()],
        [len(part) for part in meta.chunk(7)],
        error(lambda: meta[5]),
        error(lambda: meta["x"]),
        error(lambda: meta.select_samples([5])),
        error(lambda: meta.reorder([0, 1])),
        error(lambda: meta.union(few)),
        error(lambda: tq.BatchMeta.concat([meta, ordered])),
        error(lambda: tq.BatchMeta.concat([meta, clash])),
        error(lambda: tq.BatchMeta([1], [])),
        error(lambda: meta.update_custom_meta([{}])),
    ]


@scenario
def an_empty_meta_needs_no_arguments(tq: Any, p: str) -> Any:
    return error(lambda: tq.BatchMeta())


# rows by number


@scenario
def rows_are_put_fetched_and_consumed_by_task(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(numbers(4), partition_id=p)
    before = client.check_consumption_status("train", p), client.check_production_status(["x"], p)
    first = client.get_meta(["x"], 3, p, task_name="train")
    values = client.get_data(first)
    few = client.get_meta(["x"], 3, p, task_name="train")
    rest = client.get_meta(["x"], 1, p, task_name="train")
    other = client.get_meta(["x"], 4, p, task_name="other")
    done = client.check_consumption_status("train", p)
    _, status = client.get_consumption_status("train", p)
    client.reset_consumption(p, "train")
    again = client.get_meta(["x"], 4, p, task_name="train")
    return [meta, before, first, values, few, rest, other, done, status, again]


@scenario
def a_field_is_added_to_rows_by_number(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(numbers(3), partition_id=p)
    waiting = client.get_meta(["x", "y"], 3, p, task_name="t")
    more = client.put(TensorDict({"y": jagged(1, 2, 3)}, 3), meta)
    _, status = client.get_production_status(["x", "y"], p)
    both = client.get_meta(["x", "y"], 3, p, task_name="t")
    return [waiting, more, status, client.get_data(both.select_fields(["y"])), both]


@scenario
def tags_travel_with_rows_by_number(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(numbers(2), partition_id=p)
    meta.update_custom_meta([{"score": 0.5}, {"score": None}])
    client.set_custom_meta(meta)
    return client.get_meta(["x"], 2, p, task_name="t"), tq.kv_list(p)


@scenario
def everything_is_fetched_by_force(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(numbers(2), partition_id=p)
    client.get_meta(["x"], 2, p, task_name="t")
    return client.get_meta(["x"], 2, p, mode="force_fetch", task_name="t")


@scenario
def keys_and_numbers_are_one_row(tq: Any, p: str) -> Any:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], p, numbers(3), [{"n": i} for i in range(3)])
    meta = client.kv_retrieve_meta(["c", "a"], p)
    keys = client.kv_retrieve_keys(meta.global_indexes, p)
    values = client.get_data(meta)
    written = client.put(TensorDict({"y": torch.ones(2)}, 2), meta)
    made = client.kv_retrieve_meta(["new"], p, create=True)
    fetched = client.get_meta(["x", "y"], 2, p, task_name="t")
    return [
        meta,
        keys,
        values,
        written,
        tq.kv_batch_get(["a", "c"], p),
        made,
        client.kv_retrieve_meta(["zz"], p),
        sorted(client.kv_retrieve_keys(fetched.global_indexes, p)),
        error(lambda: client.kv_retrieve_meta([], p)),
        error(lambda: client.kv_retrieve_meta([1], p)),
        error(lambda: client.kv_retrieve_keys([], p)),
        error(lambda: client.kv_retrieve_keys("a", p)),
    ]


@scenario
def rows_and_partitions_are_cleared_by_number(tq: Any, p: str) -> Any:
    client = tq.get_client()
    meta = client.put(numbers(4), partition_id=p)
    client.clear_samples(meta.select_samples([0, 2]))
    left = client.get_meta(["x"], 2, p, task_name="t")
    values = client.get_data(left)
    gone = "error" in error(lambda: client.get_data(meta))
    client.clear_partition(p)
    listed = p in client.get_partition_list()
    client.put(numbers(1), partition_id=p)
    return [left, values, gone, listed, client.get_meta(["x"], 1, p, task_name="t")]


@scenario
def mistakes_of_the_client(tq: Any, p: str) -> Any:
    client = tq.get_client()
    return [
        error(lambda: client.put(numbers(1))),
        error(lambda: client.put(numbers(1), tq.BatchMeta.empty())),
        error(lambda: client.get_data(tq.BatchMeta.empty())),
        error(lambda: client.clear_samples(tq.BatchMeta.empty())),
        error(lambda: client.clear_partition(f"{p}-nowhere")),
        error(lambda: client.check_consumption_status("t", f"{p}-nowhere")),
        error(lambda: client.check_production_status(["x"], f"{p}-nowhere")),
    ]


@scenario
def the_client_is_awaited(tq: Any, p: str) -> Any:
    client = tq.get_client()

    async def play() -> Any:
        meta = await client.async_put(numbers(2), partition_id=p)
        found = await client.async_get_meta(["x"], 2, p, task_name="t")
        done = await client.async_check_consumption_status("t", p)
        values = await client.async_get_data(found)
        await client.async_clear_samples(meta)
        return found, done, values

    return asyncio.run(play())


# samplers


@scenario
def groups_are_whole(tq: Any, p: str) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=3)
    return [
        sampler.sample([0, 1, 2, 3, 4, 5], 3),
        sampler.sample([0, 1, 3, 4, 5, 9, 10, 11], 6),
        sampler.sample([0, 1, 3, 4], 3),
        error(lambda: sampler.sample([0, 1, 2], 2)),
        error(lambda: tq.GRPOGroupNSampler(0)),
    ]


@scenario
def a_group_is_of_one_prompt(tq: Any, p: str) -> Any:
    return tq.GRPOGroupNSampler(n_samples_per_prompt=2).sample([1, 2, 4, 5], 2)


@scenario
def ranks_of_a_group_get_the_same(tq: Any, p: str) -> Any:
    sampler = tq.RankAwareSampler()
    named = {"task_name": "t", "partition_id": p}
    first = sampler.sample([1, 2, 3], 2, dp_rank=0, batch_index=0, **named)
    same = sampler.sample([3], 2, dp_rank=0, batch_index=0, **named)
    other = sampler.sample([3], 2, dp_rank=1, batch_index=0, **named)
    cached = sampler.has_cached_result(p, "t", {"dp_rank": 0, "batch_index": 0})
    sampler.clear_cache(p)
    return [first, same, other, cached, sampler.save_checkpoint()]


@scenario
def lengths_are_balanced_between_ranks(tq: Any, p: str) -> Any:
    class Lengths:
        def get_custom_meta(self, rows: list[int]) -> dict[int, dict[str, int]]:
            return {i: {"total_lengths": (7, 1, 5, 3, 6, 2, 4, 8)[i // 2]} for i in rows}

    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    named = {"task_name": "t", "partition_id": p, "batch_index": 0, "partition": Lengths()}
    rows = list(range(16))
    found = [sampler.sample(rows, 8, dp_rank=rank, **named)[0] for rank in (0, 1, 0)]
    sums = [sum((7, 1, 5, 3, 6, 2, 4, 8)[i // 2] for i in taken) for taken in found]
    return sorted(sums[:2]), found[0] == found[2], sorted(found[0] + found[1]) == rows


@scenario
def rows_are_streamed(tq: Any, p: str) -> Any:
    client = tq.get_client()
    client.put(numbers(6), partition_id=p)
    dataset = tq.StreamingDataset(CONFIGURATION["made"], 3, 2, ["x"], p, "t", 0, True)
    loader = tq.StreamingDataLoader(dataset)
    seen = [(batch, meta.size) for batch, meta in loader]
    loader.reset()
    rows = sorted(row for batch, _ in seen for row in told(batch["x"])["jagged"])
    sizes = [size for _, size in seen]
    wrong = [error(partial(tq.StreamingDataset, *a)) for a in BAD]
    return rows, sizes, len(loader.get_buffer()), wrong


BAD: list[tuple[Any, ...]] = [
    ({}, 1, 0, ["x"], "p", "t", 0),
    ({}, 1, 1, [], "p", "t", 0),
    ({}, 1, 1, ["x"], "p", "t", -1),
]


@scenario
def a_checkpoint_brings_rows_back(tq: Any, p: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        client = tq.get_client()
        tq.kv_batch_put(["a", "b"], p, numbers(2), [{"n": 1}, {"n": 2}])
        client.put(numbers(3), partition_id=f"{p}-n")
        client.get_meta(["x"], 1, f"{p}-n", task_name="t")
        tq.save_checkpoint(f"{folder}/c", metadata={"step": 3})
        with open(f"{folder}/c/metadata.json") as file:
            kept = json.load(file)
        tq.kv_clear(["a"], p)
        tq.kv_put("new", p, {"x": torch.tensor([1, 2])})
        tq.load_checkpoint(f"{folder}/c")
        rest = client.get_meta(["x"], 2, f"{p}-n", task_name="t")
        missing = error(lambda: tq.load_checkpoint(f"{folder}/no"))
        values = client.get_data(rest)
    return kept, tq.kv_list(p), tq.kv_batch_get(["a", "b"], p), rest, values, missing


def main(module: str) -> None:
    tq = importlib.import_module(module)
    CONFIGURATION["made"] = tq.init(CONFIGURATION)
    found = {name: error(partial(call, tq, name)) for name, call in SCENARIOS.items()}
    tq.close()
    print("RESULTS " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
