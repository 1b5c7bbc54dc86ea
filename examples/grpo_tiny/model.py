"""The task, and a transformer small enough to learn it from scratch on a CPU.

"Count on": a prompt is [start, step], the answer counts on from start by step, modulo 10: [7, 3]
wants 0 3 6 9 2 5 8 1. The reward is the share of tokens that are right after the one before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

DIGITS, PROMPT, ANSWER = 10, 2, 8  # tokens of the vocabulary, of a prompt, of an answer


def prompts(step: int, groups: int) -> np.ndarray:
    """[groups, 2] int64: a new batch of prompts for each step, the same in every run."""
    rng = np.random.default_rng(step)
    return np.stack([rng.integers(0, DIGITS, groups), rng.integers(1, 4, groups)], axis=1)


def score(prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """[rows] float32 in 0..1, of prompts [rows, 2] and answers [rows, 8]."""
    before = np.concatenate([prompt[:, :1], answer[:, :-1]], axis=1)
    return ((before + prompt[:, 1:]) % DIGITS == answer).mean(axis=1, dtype=np.float32)


class Model(nn.Module):
    """A decoder of 2 layers and 0.2 million parameters. Every process starts from the same ones."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(DIGITS, width), nn.Linear(width, DIGITS)
        self.place = nn.Embedding(PROMPT + ANSWER, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, length, 10] of tokens [rows, length]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        seen = self.token(tokens) + self.place(torch.arange(length))
        return self.head(self.layers(seen, mask=mask, is_causal=True))

    def logprobs(self, prompt: Tensor, answer: Tensor) -> Tensor:
        """Of each token of the answers: [rows, 8]."""
        logits = self(torch.cat([prompt, answer[:, :-1]], dim=1))[:, PROMPT - 1 :]
        return logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]

    def sample(self, prompt: Tensor) -> Tensor:
        """One answer [rows, 8] for each prompt."""
        tokens = prompt
        for _ in range(ANSWER):
            chances = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens[:, PROMPT:]
