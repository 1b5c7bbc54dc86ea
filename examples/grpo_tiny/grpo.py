"""The task, a transformer small enough to learn it from scratch on a CPU, and the work of each
stage: columns in, new columns out. Nothing here depends on how rows reach a stage.

A prompt is [start, step]. The answer must count on from start by step, modulo 10: the answer to
[7, 3] is 0 3 6 9 2 5 8 1. The reward is the share of tokens that correctly follow the one before.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

DIGITS, PROMPT, ANSWER = 10, 2, 8  # vocabulary size; tokens per prompt and per answer
GROUPS, GROUP_SIZE = 8, 16  # prompts per step, answers per prompt
ROWS, CLIP, KL = GROUPS * GROUP_SIZE, 0.2, 0.002

# Each stage, and the fields that a row must have before the stage receives it. Nothing else orders
# the stages.
STAGES = {
    "rollout": ["prompt"],
    "reward": ["prompt", "answer"],
    "reference": ["prompt", "answer"],
    "train": ["prompt", "answer", "logprobs", "version", "reward", "reference"],
}


def prompts(step: int) -> Tensor:
    """Return the prompts of a step, int64 [rows, 2]. Every run has the same ones."""
    luck = torch.Generator().manual_seed(step)
    starts, steps = (torch.randint(*of, (GROUPS,), generator=luck) for of in ((0, DIGITS), (1, 4)))
    return torch.stack([starts, steps], dim=1).repeat_interleave(GROUP_SIZE, 0)


class Model(nn.Module):
    """A decoder with 2 layers and 0.2 million parameters, which start the same in every process."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(DIGITS, width), nn.Embedding(PROMPT + ANSWER, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, DIGITS)
        self.register_buffer("version", torch.tensor(0))  # number of training steps so far
        self.optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        torch.seed()  # same first weights everywhere, different samples

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [rows, length, 10] of tokens [rows, length]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        seen = self.token(tokens) + self.place(torch.arange(length))
        return self.head(self.layers(seen, mask=mask, is_causal=True))

    def logprobs(self, prompt: Tensor, answer: Tensor) -> Tensor:
        """Return the log probability of each answer token, [rows, 8]."""
        logits = self(torch.cat([prompt, answer[:, :-1]], dim=1))[:, PROMPT - 1 :]
        return logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]

    def load(self, out: Path) -> None:
        """Load the newest weights. They travel through a file, not through the data plane."""
        if (out / "weights.pt").exists():
            weights, adam = torch.load(out / "weights.pt")
            self.load_state_dict(weights)
            self.optimizer.load_state_dict(adam)


@torch.no_grad()
def rollout(model: Model, out: Path, prompt: Tensor) -> dict[str, Tensor]:
    model.load(out)
    tokens, version = prompt, model.version.repeat(len(prompt))
    for _ in range(ANSWER):
        chances = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    answer = tokens[:, PROMPT:]
    return {"answer": answer, "logprobs": model.logprobs(prompt, answer), "version": version}


def reward(model: Model, out: Path, prompt: Tensor, answer: Tensor) -> dict[str, Tensor]:
    before = torch.cat([prompt[:, :1], answer[:, :-1]], dim=1)
    return {"reward": ((before + prompt[:, 1:]) % DIGITS == answer).float().mean(dim=1)}


@torch.no_grad()
def reference(model: Model, out: Path, prompt: Tensor, answer: Tensor) -> dict[str, Tensor]:
    """Return the log probabilities of the answers under the untrained model."""
    return {"reference": model.logprobs(prompt, answer)}


def train(model: Model, out: Path, **rows: Tensor) -> dict[str, Tensor]:
    """Train one step. Trainers average their gradients, and save the weights before the ack."""
    model.optimizer.zero_grad()
    loss_of(model, **rows).backward()
    reward = rows["reward"].mean()
    for one in [reward, *(weight.grad for weight in model.parameters())]:
        dist.all_reduce(one)
        one /= dist.get_world_size()
    model.optimizer.step()
    model.version += 1
    if dist.get_rank() == 0:
        torch.save([model.state_dict(), model.optimizer.state_dict()], out / "weights.new")
        (out / "weights.new").replace(out / "weights.pt")
        lag = int(model.version - 1 - rows["version"].min())
        told = {"step": int(model.version), "reward": float(reward), "lag": lag}
        with (out / "steps.jsonl").open("a") as log:
            print(json.dumps(told), file=log)
    return {}


def loss_of(model: Model, prompt: Tensor, answer: Tensor, **rows: Tensor) -> Tensor:
    """Return the GRPO loss of whole groups (Shao et al. 2024, arXiv 2402.03300)."""
    reward = rows["reward"].view(-1, GROUP_SIZE)
    spread = reward.std(dim=1, keepdim=True) + 0.1  # + 0.1: equal rewards must not divide by 0
    advantage = ((reward - reward.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    logprobs = model.logprobs(prompt, answer)
    ratio = (logprobs - rows["logprobs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    away = rows["reference"] - logprobs
    kl = away.exp() - away - 1  # an unbiased estimate that is never negative
    return (KL * kl - torch.minimum(ratio * advantage, clipped * advantage)).mean()


DO = {"rollout": rollout, "reward": reward, "reference": reference, "train": train}
