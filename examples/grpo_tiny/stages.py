"""What each stage does with rows, whatever brings them: columns in, new columns out."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import Model, score
from torch import Tensor

GROUPS, GROUP_SIZE = 16, 16  # prompts of a step, and answers to each
ROWS = GROUPS * GROUP_SIZE
CLIP, KL = 0.2, 0.002
Columns = dict[str, Tensor]

# Stages, and the fields that must be there before one gets a row. They are in no other order.
STAGES = {
    "rollout": ["prompt"],
    "reward": ["prompt", "answer"],
    "reference": ["prompt", "answer"],
    "train": ["prompt", "answer", "logprobs", "version", "reward", "reference"],
}


@torch.no_grad()
def rollout(model: Model, out: Path, prompt: Tensor) -> Columns:
    """Answers by the newest weights. How these come here is not the plane's matter: by a file."""
    load(model, out)
    answer, version = model.sample(prompt), model.version.repeat(len(prompt))
    return {"answer": answer, "logprobs": model.logprobs(prompt, answer), "version": version}


def reward(model: Model, out: Path, prompt: Tensor, answer: Tensor) -> Columns:
    return {"reward": score(prompt, answer)}


@torch.no_grad()
def reference(model: Model, out: Path, prompt: Tensor, answer: Tensor) -> Columns:
    """How likely the answers were before any training."""
    return {"reference": model.logprobs(prompt, answer)}


def train(model: Model, out: Path, **rows: Tensor) -> Columns:
    """A step of one of several trainers, which average their gradients and so have the same
    weights. The new ones are there before the rows are acked."""
    if model.version == 0:
        load(model, out)  # where a trainer was killed, all go on from there
    model.optimizer.zero_grad()
    grpo_loss(model, **rows).backward()
    reward = rows["reward"].mean()
    for one in [reward, *(weight.grad for weight in model.parameters())]:
        dist.all_reduce(one)
        one /= dist.get_world_size()
    model.optimizer.step()
    model.version += 1
    if dist.get_rank() == 0:
        save(model, out)
        lag = int(model.version - 1 - rows["version"].min())
        with (out / "steps.jsonl").open("a") as log:
            print(
                json.dumps({"step": int(model.version), "reward": float(reward), "lag": lag}),
                file=log,
            )
    return {}


def grpo_loss(model: Model, prompt: Tensor, answer: Tensor, **rows: Tensor) -> Tensor:
    """Of whole groups (Shao et al. 2024, arXiv 2402.03300)."""
    reward = rows["reward"].view(-1, GROUP_SIZE)
    spread = reward.std(dim=1, keepdim=True) + 0.1  # a group of equals teaches nothing
    advantage = ((reward - reward.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    logprobs = model.logprobs(prompt, answer)
    ratio = (logprobs - rows["logprobs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    away = rows["reference"] - logprobs
    kl = away.exp() - away - 1  # never negative, and right on average
    return (KL * kl - torch.minimum(ratio * advantage, clipped * advantage)).mean()


def save(model: Model, out: Path) -> None:
    """The weights are there whole or not at all."""
    torch.save(model.state_dict(), out / "weights.new")
    os.replace(out / "weights.new", out / "weights.pt")


def load(model: Model, out: Path) -> None:
    if (out / "weights.pt").exists():
        model.load_state_dict(torch.load(out / "weights.pt"))


DO = {"rollout": rollout, "reward": reward, "reference": reference, "train": train}
WORKERS = [
    (stage, rank) for stage in DO for rank in range(2 if stage in ("rollout", "train") else 1)
]
