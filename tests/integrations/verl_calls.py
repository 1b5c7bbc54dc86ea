"""A step of verl's trainer on whatever `transfer_queue` is: `python -m … ROWS BYTES` prints it.

verl's own classes do the work, in Ray actors: the agent loop puts trajectories, the replay buffer
samples them, the trainer's methods read, compute and write back, `tqbridge` carries a worker's
input and output. Only what needs a GPU is replaced: the model that writes, and the one that scores.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from PIL import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.transferqueue_utils import tqbridge

SAMPLES = 4
RUN = "VERL_CALLS"
CONFIG = OmegaConf.create(
    {
        "actor_rollout_ref": {
            "rollout": {
                "n": SAMPLES,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "calculate_log_probs": False,
                "val_kwargs": {"n": 1, "top_p": 1.0, "top_k": -1, "temperature": 0},
                "agent": {"default_agent_loop": "single_turn_agent"},
            },
            "actor": {
                "ppo_mini_batch_size": 2,
                "loss_agg_mode": "token-mean",
                "loss_scale_factor": None,
            },
        },
        "algorithm": {
            "adv_estimator": "grpo",
            "gamma": 1.0,
            "lam": 1.0,
            "use_kl_in_reward": False,
            "norm_adv_by_std_in_grpo": True,
        },
        "trainer": {"critic_warmup": 0},
        "data": {"train_batch_size": 4},
    }
)


def numbers_of(text: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(text.encode()))


class Rollout(AgentLoopWorkerTQ.__ray_metadata__.modified_class.__bases__[0]):  # type: ignore[misc]
    """verl's worker, whose model is a generator of random numbers."""

    def __init__(self, media_bytes: int) -> None:
        tq.init()
        self.config = CONFIG
        self.processor = None
        self.background_tasks: set[Any] = set()
        self.media_values = media_bytes // 4

    def ready(self) -> bool:
        return True

    async def _run_agent_loop(
        self, sampling_params: Any, trajectory: Any, *, agent_name: str, trace: bool, **named: Any
    ) -> None:
        draw = numbers_of(f"{named['uid']}/{named['session_id']}")
        prompt = numbers_of(named["uid"]).integers(0, 100, 3 + len(named["uid"])).tolist()
        length = int(draw.integers(2, 9))
        output = AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=draw.integers(0, 100, length).tolist(),
            response_mask=[1] * length,
            response_logprobs=[-0.5] * length,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": 1, "max_global_steps": None, "turns": [1, 2]},
        )
        await self._agent_loop_postprocess(output, trajectory["validate"], **named)

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None:
        pass

    async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _compute_multi_modal_inputs(self, output: Any, input_ids: torch.Tensor) -> dict[str, Any]:
        # One image a prompt, as long as its name: all samples of a group have the same.
        values = torch.arange(self.media_values, dtype=torch.float32) + len(output.prompt_ids)
        values[0] = float(zlib.crc32(str(output.prompt_ids).encode()) % 1000)
        return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 2, 2]])}


@ray.remote
class Actor:
    """A training worker: what it is given by `tqbridge` is values, what it returns is kept."""

    def ready(self) -> bool:
        return True

    @tqbridge()  # type: ignore[untyped-decorator]
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        assert data["temperature"] == 1.0
        rows = [ids.float() / 100 for ids in data["input_ids"].unbind()]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": nested, "entropy": nested * 2}, batch_size=len(data))


class Actors:
    """As much of a worker group as the trainer needs: each gets its chunk."""

    def __init__(self) -> None:
        self.workers = [Actor.remote() for _ in range(2)]  # type: ignore[attr-defined]
        ray.get([worker.ready.remote() for worker in self.workers])
        self._dispatch_info = {"actor": [0, 1]}

    def compute_log_prob(self, batch: Any) -> Any:
        parts = batch.chunk(len(self.workers))
        calls = zip(self.workers, parts, strict=True)
        return tq.KVBatchMeta.concat(ray.get([w.compute_log_prob.remote(p) for w, p in calls]))


class Rewards:
    """A model that scores a response by its own numbers."""

    def compute_rm_score(self, data: DataProto) -> DataProto:
        responses = data.batch["responses"]
        scores = torch.zeros_like(responses, dtype=torch.float32)
        scores[:, 0] = (responses.sum(1) % 7).float()
        right = np.array([{"acc": float(s)} for s in scores[:, 0]], dtype=object)
        assert [message[0]["role"] for message in data.non_tensor_batch["raw_prompt"]]
        return DataProto(
            batch=TensorDict({"rm_scores": scores}, batch_size=len(data)),
            non_tensor_batch={"reward_info": right},
            meta_info={"reward_extra_keys": ["reward_info"]},
        )


class Tokens:
    pad_token_id = 0
    eos_token_id = 1


def trainer_of(mode: str, rollouts: list[Any], actors: Actors) -> Any:
    manager = object.__new__(AgentLoopManagerTQ)
    manager.agent_loop_workers = rollouts
    trainer = object.__new__(PPOTrainerSync)
    told = {"config": CONFIG, "global_steps": 1, "trainer_mode": mode, "use_critic": False}
    told |= {"agent_loop_manager": manager, "actor_rollout_wg": actors, "tokenizer": Tokens()}
    for name, value in (told | {"reward_loop_manager": Rewards()}).items():
        setattr(trainer, name, value)
    return trainer


def question(name: str) -> list[dict[str, Any]]:
    """Messages as verl's dataset makes them of a row with an image: with the image itself."""
    image = Image.fromarray(numbers_of(name).integers(0, 256, (28, 56, 3), np.uint8))
    content = [{"type": "image", "image": image}, {"type": "text", "text": name}]
    return [{"role": "user", "content": content}]


def prompts(count: int, mark: str) -> TensorDict:
    names = [f"{mark}{number}" for number in range(count)]
    fields = {
        "uid": NonTensorStack(*names),
        "index": torch.arange(count),
        "raw_prompt": NonTensorStack(*map(question, names)),
        "raw_prompt_ids": NonTensorStack(*[[1, 2, number] for number in range(count)]),
    }
    batch = TensorDict(fields, batch_size=count)
    batch["global_steps"] = NonTensorData(1)
    return batch


def digest(value: Any) -> Any:
    """Values as short plain JSON."""
    if isinstance(value, torch.Tensor):
        rows = value.unbind() if value.is_nested else [value]
        found = hashlib.sha256()
        for row in rows:
            found.update(row.contiguous().numpy().tobytes())
        kind = "jagged" if value.is_nested else "dense"
        return [kind, str(value.dtype), [list(row.shape) for row in rows], found.hexdigest()[:12]]
    if isinstance(value, NonTensorStack):
        return digest(value.tolist())
    if isinstance(value, NonTensorData):
        return digest(value.data)
    if isinstance(value, np.ndarray | np.generic):
        return digest(value.tolist())
    if isinstance(value, Image.Image):
        return [value.mode, value.size, hashlib.sha256(value.tobytes()).hexdigest()[:12]]
    if isinstance(value, dict):
        return {str(key): digest(one) for key, one in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [digest(one) for one in value]
    return value


def digests(data: TensorDict) -> dict[str, Any]:
    return {
        name: digest(column if isinstance(column, torch.Tensor) else list(column))
        for name, column in sorted(data.items())
    }


def resumed(trainer: Any, buffer: Any) -> dict[str, Any]:
    """A checkpoint of the queue with prompts that nobody has answered; what is restored of it; the
    prompts are given out again, and the batch is padded to a multiple."""
    trainer.trainer_mode, manager = "async", trainer.agent_loop_manager
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: None)
    trainer._submit_batch_to_rollout(prompts(2, "resumed"))
    trainer.agent_loop_manager = manager
    before = tq.kv_list("train")
    with tempfile.TemporaryDirectory() as folder:
        tq.save_checkpoint(f"{folder}/queue", metadata={"global_steps": 1})
        tq.kv_clear(keys=list(before["train"]), partition_id="train")
        tq.load_checkpoint(f"{folder}/queue")
    same, again = tq.kv_list("train") == before, trainer._reissue_inflight_prompts()
    batch, _ = buffer.sample(1, "train", 2)
    batch.reorder(sorted(range(len(batch)), key=lambda place: batch.keys[place]))
    padded = upsample_batch_to_divisible_size(batch, 5, Tokens.eos_token_id)
    whole = tq.kv_batch_get(keys=padded.keys, partition_id="train")
    whole.pop("uid")  # of padding it is random
    tq.kv_clear(keys=padded.keys, partition_id="train")
    left = tq.kv_list("train")["train"]
    return {"same": same, "again": again, "values": digests(whole), "left": digest(left)}


def step(mode: str, mark: str, buffer: Any, trainer: Any, count: int) -> dict[str, Any]:
    """One step of a trainer: rollout, reward, log-probabilities, advantages, and the end of it."""
    trainer.trainer_mode = mode
    seconds = {}
    start = time.monotonic()

    def timed(name: str) -> None:
        nonlocal start
        seconds[name] = round(time.monotonic() - start, 4)
        start = time.monotonic()

    trainer._submit_batch_to_rollout(prompts(count, mark))
    sampled, _ = buffer.sample(1, "train", count)
    timed("rollout and sample")
    places = sorted(range(len(sampled)), key=lambda place: sampled.keys[place])
    sampled.reorder(places)
    batch = trainer._compute_reward_colocate(sampled)
    timed("reward")
    metrics: dict[str, Any] = {}
    batch.extra_info = {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    timed("log-probabilities")
    batch = trainer._compute_advantage(batch, metrics)
    timed("advantages")
    batch = trainer._balance_batch(batch, metrics)
    whole = tq.kv_batch_get(keys=sorted(batch.keys), partition_id="train")
    timed("read")
    values = digests(whole)
    left = tq.kv_list("train")["train"]
    start = time.monotonic()
    tq.kv_clear(keys=batch.keys, partition_id="train")
    timed("clear")
    return {
        "keys": sorted(batch.keys),
        "fields": sorted(batch.fields or ()),
        "tags": digest(sorted(batch.tags, key=json.dumps)),
        "left": sorted(left),
        "metrics": {name: round(float(v), 5) for name, v in metrics.items()},
        "values": values,
        "cleared": sorted(tq.kv_list("train").get("train", {})),
        "seconds": seconds,
    }


def memory() -> dict[str, int]:
    """Bytes of all processes of this run by their names, anonymous pages and shared ones (`name,
    shared`) apart. Pages that several map are counted once (PSS). The processes are known by their
    environment: Ray's daemons and the plane's peer are no descendants of this one."""
    found: dict[str, int] = {}
    run = f"{RUN}={os.environ[RUN]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if run not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode().split("/")[-1]
            name = name.split(".")[0]  # of an actor, without the call that it is in
            told = (folder / "smaps_rollup").read_text().split()
        except OSError:
            continue  # it ended meanwhile
        kib = {kind: int(told[told.index(f"Pss_{kind}:") + 1]) for kind in ("Anon", "Shmem")}
        found[name] = found.get(name, 0) + (kib["Anon"] << 10)
        found[f"{name}, shared"] = found.get(f"{name}, shared", 0) + (kib["Shmem"] << 10)
    return found


def main(count: int, media_bytes: int) -> None:
    os.environ[RUN] = str(os.getpid())
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"total_storage_size": 100_000}}}))
    rollouts = [ray.remote(Rollout).options(num_cpus=1).remote(media_bytes) for _ in range(2)]
    ray.get([worker.ready.remote() for worker in rollouts])
    trainer = trainer_of("sync", rollouts, Actors())
    common: tuple[Any, ...] = ({}, None, "drop", {})
    buffers = {"sync": ReplayBuffer("sync", *common, 0.02)}
    buffers["async"] = ReplayBufferAsync("async", *common, 0.02)
    before = memory()
    looks, done = [before], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            looks.append(memory())

    looking = threading.Thread(target=look, daemon=True)  # a step that fails ends the process
    looking.start()
    steps = {"first": step("sync", "first", buffers["sync"], trainer, count)}
    for mode, buffer in buffers.items():
        steps[mode] = step(mode, mode, buffer, trainer, count)
    done.set()
    looking.join()
    after = resumed(trainer, buffers["async"])
    peak, rest = max(looks, key=lambda look: sum(look.values())), memory()
    more = {name: now - before.get(name, 0) for name, now in peak.items()}
    seconds = {name: one.pop("seconds") for name, one in steps.items()}
    told = {
        "of": importlib.metadata.version("verl"),
        "by": tq.__file__,
        "seconds": seconds,
        "more_bytes": sum(more.values()),
        "more_at_rest_bytes": sum(rest.values()) - sum(before.values()),
        "more_by_process": dict(sorted(more.items(), key=lambda one: -one[1])),
    }
    tq.close()
    ray.shutdown()
    print("RESULTS " + json.dumps({"steps": steps, "resumed": after, "told": told}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
