"""OpenRLHF's asynchronous trainer with a queue of Ray's or of the plane: `python … ours|rays`.

Its own `PPOTrainerAsync`, and the loops of its two actors, carry its own `Experience`s. Only what
needs a GPU is replaced: the engine that writes samples, and the step that trains on them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openrlhf_stand_ins  # type: ignore[import-not-found]
import ray

openrlhf_stand_ins.install()

import torch  # noqa: E402
from openrlhf.trainer import ppo_trainer_async  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import (  # noqa: E402
    Experience,
    make_experience_batch,
    split_experience_batch,
)
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from dataplane.integrations.openrlhf import Queue  # noqa: E402

PROMPTS, SAMPLES, MEDIA = 6, 4, 50_000


def plain(actor: Any) -> type:
    """The class under `@ray.remote`."""
    under: type = actor.__ray_metadata__.modified_class.__bases__[0]
    return under


class Samples:
    """Two prompts a call, and so many samples of each; the media of a prompt's are the same."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.prompts = iter(loader)

    def generate_samples(self, **told: Any) -> tuple[list[Experience], float, int, bool]:
        made: list[Experience] = []
        prompts = [p for _ in range(2) for p in next(self.prompts, [])]
        for prompt in prompts:
            numbers = torch.Generator().manual_seed(int(prompt))
            media = torch.randn(MEDIA, generator=numbers)
            for sample in range(SAMPLES):
                length = 5 + (int(prompt) + sample) % 3
                one = Experience(
                    sequences=torch.randint(0, 99, (1, length), generator=numbers),
                    attention_mask=torch.ones((1, length), dtype=torch.long),
                    action_mask=torch.ones((1, length - 1), dtype=torch.bool),
                    rollout_log_probs=torch.randn((1, length - 1), generator=numbers).bfloat16(),
                    prompts=[f"prompt {int(prompt)}"],
                    labels=[None],
                    mm_train_inputs=[{"pixel_values": media.clone(), "image_grid_thw": None}],
                    rewards=torch.tensor([0.5]),
                    truncated=torch.tensor([False]),
                    total_length=torch.tensor([length]),
                    info={"length": torch.tensor([float(length)])},
                )
                made.append(one)
        return made, 1.0, len(prompts), not prompts


@ray.remote
class Generating(plain(ppo_trainer_async.GenerateSamplesActor)):  # type: ignore[misc]
    def __init__(self, vllm_lock: Any, rollout_queue: Any, rollout_slots: Any, **_: Any) -> None:
        self.args = SimpleNamespace(train=SimpleNamespace(num_episodes=1))
        self.prompts_dataloader = StatefulDataLoader(list(range(PROMPTS)), batch_size=1)
        self.samples_generator = Samples(self.prompts_dataloader)
        self.eval_dataloader, self.max_steps = None, PROMPTS // 2
        self.generate_kwargs: dict[str, Any] = {}
        self.vllm_lock, self._partial_rollout = vllm_lock, False
        self.rollout_queue, self.rollout_slots = rollout_queue, rollout_slots
        self._last_eval_step, self._eval_just_done = -1, False


@ray.remote
class Training(plain(ppo_trainer_async.TrainingActor)):  # type: ignore[misc]
    def __init__(self, vllm_lock: Any, rollout_queue: Any, rollout_slots: Any, **_: Any) -> None:
        self.args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_enable=True))
        self.vllm_lock, self._partial_rollout = vllm_lock, False
        self.rollout_queue, self.rollout_slots = rollout_queue, rollout_slots
        self.wandb_logger = self.tensorboard_logger = None
        self.seen: list[Any] = []

    def init_checkpoint_states(self) -> dict[str, int]:
        return {"episode": 0, "global_step": 0}

    def restore_best_checkpoint_state(self, states: Any) -> None:
        pass

    def train_step(self, samples: list[Experience], step: int) -> tuple[dict[str, Any], int]:
        rows = [row for sample in samples for row in split_experience_batch(sample)]
        batch = make_experience_batch(rows)
        told = {name: shown(value) for name, value in vars(batch).items()}
        self.seen.append(told)
        return {}, step + 1

    def save_logs_and_checkpoints(self, step: int, status: Any, states: Any) -> None:
        told = states["data_loader_state_dict"]
        self.seen[-1] |= {"states": sorted(states), "loader": shown(told), "status": sorted(status)}

    def result(self) -> list[Any]:
        return self.seen


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(raw).hexdigest()[:16]]
    if isinstance(value, dict):
        return {str(key): shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(shown, value)]
    return repr(value)


def main(which: str) -> None:
    environment = {
        "env_vars": {"PYTHONPATH": str(Path(__file__).parent)},
        "worker_process_setup_hook": "openrlhf_stand_ins.install",
    }
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment
    )
    if which == "ours":
        ppo_trainer_async.Queue = Queue
    ppo_trainer_async.GenerateSamplesActor = Generating
    ppo_trainer_async.TrainingActor = Training
    strategy = SimpleNamespace(
        args=SimpleNamespace(
            eval=SimpleNamespace(steps=-1),
            ckpt=SimpleNamespace(save_steps=-1),
            train=SimpleNamespace(async_queue_size=1),
        )
    )
    trainer = plain(ppo_trainer_async.PPOTrainerAsync)("", strategy, *[None] * 5)
    trainer.fit()
    steps = ray.get(trainer.trainer_actor.result.remote())
    print(
        "RESULTS " + json.dumps({"queue": type(trainer.rollout_queue).__module__, "steps": steps})
    )
    if which == "ours":
        trainer.rollout_queue.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
