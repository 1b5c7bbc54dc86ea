"""What each stage does with a batch of rows, whatever brings them: columns in, new columns out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model import Model, load, save, score

GROUPS, GROUP_SIZE = 16, 16  # prompts of a step, and answers to each
ROWS = GROUPS * GROUP_SIZE
CLIP, KL = 0.2, 0.002

Columns = dict[str, np.ndarray]

# Stages, and the fields that must be there before one gets a row. They are in no other order.
STAGES = {
    "rollout": ["prompt"],
    "reward": ["prompt", "answer"],
    "reference": ["prompt", "answer"],
    "train": ["prompt", "answer", "logprobs", "version", "reward", "reference"],
}
WORKERS = {"rollout": 2, "reward": 1, "reference": 1, "train": 2}


def stage_of(name: str, out: Path) -> Callable[[Columns], Columns]:
    match name:
        case "rollout":
            return Rollout(out)
        case "reward":
            return reward
    return Reference()


class Rollout:
    def __init__(self, out: Path) -> None:
        self.model, self.weights = Model(), out / "weights.pt"
        self.version, self.written = 0, 0
        torch.seed()  # the first weights are everybody's, the luck our own

    @torch.no_grad()
    def __call__(self, rows: Columns) -> Columns:
        self.refresh()
        prompt = torch.from_numpy(rows["prompt"].copy())
        answer = self.model.sample(prompt)
        logprobs = self.model.logprobs(prompt, answer)
        version = np.full(len(prompt), self.version)
        return {"answer": answer.numpy(), "logprobs": logprobs.numpy(), "version": version}

    def refresh(self) -> None:
        """The newest weights, where there are newer ones."""
        written = self.weights.stat().st_mtime_ns if self.weights.exists() else 0
        if written != self.written:
            state = load(self.weights)
            self.model.load_state_dict(state["model"])
            self.version, self.written = state["version"], written


def reward(rows: Columns) -> Columns:
    return {"reward": score(rows["prompt"], rows["answer"])}


class Reference:
    """How likely the answers were before any training."""

    def __init__(self) -> None:
        self.model = Model()

    @torch.no_grad()
    def __call__(self, rows: Columns) -> Columns:
        prompt, answer = (torch.from_numpy(rows[name].copy()) for name in ("prompt", "answer"))
        return {"reference": self.model.logprobs(prompt, answer).numpy()}


class Trainer:
    """One of several, which average their gradients and have the same weights."""

    def __init__(self, out: Path) -> None:
        self.model, self.weights, self.version = Model(), out / "weights.pt", 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.log = (out / "steps.jsonl").open("a")
        if self.weights.exists():  # a trainer was killed: all go on from the last weights
            state = load(self.weights)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.version = state["version"]

    def __call__(self, rows: Columns) -> Columns:
        """A step of GRPO (Shao et al. 2024, arXiv 2402.03300) on whole groups."""
        of = {name: torch.from_numpy(column.copy()) for name, column in rows.items()}
        reward = of["reward"].view(-1, GROUP_SIZE)
        spread = reward.std(dim=1, keepdim=True) + 0.1  # a group of equals teaches nothing
        advantage = ((reward - reward.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        logprobs = self.model.logprobs(of["prompt"], of["answer"])
        ratio = (logprobs - of["logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        away = of["reference"] - logprobs
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
        return {"version": np.array([self.version])}

    def finish(self, **figures: float) -> None:
        """The weights are written before the rows are acked: who waits for that sees them."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        save(self.weights, {"model": model, "optimizer": optimizer, "version": self.version})
        line = {"step": self.version, "time": time.time(), **figures}
        print(json.dumps(line), file=self.log, flush=True)
