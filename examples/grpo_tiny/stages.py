"""What each stage does with rows, whatever brings them: columns in, new columns out."""

from __future__ import annotations

import json
import os
import time
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
WORKERS = {"rollout": 2, "reward": 1, "reference": 1, "train": 2}


class Stage:
    """All but the trainers."""

    def __init__(self, name: str, out: Path) -> None:
        self.do, self.model, self.weights = getattr(self, name), Model(), out / "weights.pt"
        self.version, self.read = 0, 0
        torch.seed()  # the first weights are everybody's, the luck our own

    @torch.no_grad()
    def __call__(self, rows: Columns) -> Columns:
        return self.do(**rows)

    def rollout(self, prompt: Tensor) -> Columns:
        written = self.weights.stat().st_mtime_ns if self.weights.exists() else 0
        if written != self.read:
            state, self.read = torch.load(self.weights, weights_only=True), written
            self.model.load_state_dict(state["model"])
            self.version = state["version"]
        answer = self.model.sample(prompt)
        logprobs, version = self.model.logprobs(prompt, answer), torch.tensor(self.version)
        return {"answer": answer, "logprobs": logprobs, "version": version.repeat(len(prompt))}

    def reward(self, prompt: Tensor, answer: Tensor) -> Columns:
        return {"reward": torch.from_numpy(score(prompt.numpy(), answer.numpy()))}

    def reference(self, prompt: Tensor, answer: Tensor) -> Columns:
        """How likely the answers were before any training."""
        return {"reference": self.model.logprobs(prompt, answer)}


class Trainer:
    """One of several, which average their gradients and have the same weights."""

    def __init__(self, out: Path) -> None:
        self.model, self.weights, self.version = Model(), out / "weights.pt", 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.log = (out / "steps.jsonl").open("a")
        if self.weights.exists():  # a trainer was killed: all go on from the last weights
            state = torch.load(self.weights, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.version = state["version"]

    def __call__(self, rows: Columns) -> Columns:
        """A step of GRPO (Shao et al. 2024, arXiv 2402.03300) on whole groups."""
        reward = rows["reward"].view(-1, GROUP_SIZE)
        spread = reward.std(dim=1, keepdim=True) + 0.1  # a group of equals teaches nothing
        advantage = ((reward - reward.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        logprobs = self.model.logprobs(rows["prompt"], rows["answer"])
        ratio = (logprobs - rows["logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        away = rows["reference"] - logprobs
        kl = away.exp() - away - 1  # never negative, and right on average
        loss = KL * kl - torch.minimum(ratio * advantage, clipped * advantage)
        self.optimizer.zero_grad()
        loss.mean().backward()
        figures = torch.stack([reward.mean(), kl.detach().mean()])
        for one in [figures, *(p.grad for p in self.model.parameters() if p.grad is not None)]:
            dist.all_reduce(one)
            one /= dist.get_world_size()
        self.optimizer.step()
        self.version += 1
        if dist.get_rank() == 0:
            lag = self.version - 1 - int(rows["version"].min())
            self.finish(reward=float(figures[0]), kl=float(figures[1]), lag=lag)
        return {}

    def finish(self, **figures: float) -> None:
        """The weights, whole or not at all, before the rows are acked: who waits for that sees
        them. How weights come to rollout is not the plane's matter; here, by a file."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"version": self.version}, self.weights.with_suffix(".new"))
        os.replace(self.weights.with_suffix(".new"), self.weights)
        line = {"step": self.version, "time": time.time(), **figures}
        print(json.dumps(line), file=self.log, flush=True)
