"""The task, and a transformer small enough to learn it from scratch on a CPU.

"Count on": a prompt is [start, step], the answer counts on from start by step, modulo 10: [7, 3]
wants 0 3 6 9 2 5 8 1. The reward is the share of tokens that are right after the one before.
"""

import torch
from torch import Tensor, nn

DIGITS, PROMPT, ANSWER = 10, 2, 8  # tokens of the vocabulary, of a prompt, of an answer


def prompts(step: int, groups: int) -> Tensor:
    """[groups, 2] int64: a new batch of prompts for each step, the same in every run."""
    luck = torch.Generator().manual_seed(step)
    starts = torch.randint(0, DIGITS, (groups,), generator=luck)
    return torch.stack([starts, torch.randint(1, 4, (groups,), generator=luck)], dim=1)


def score(prompt: Tensor, answer: Tensor) -> Tensor:
    """[rows] float32 in 0..1, of prompts [rows, 2] and answers [rows, 8]."""
    before = torch.cat([prompt[:, :1], answer[:, :-1]], dim=1)
    return ((before + prompt[:, 1:]) % DIGITS == answer).float().mean(dim=1)


class Model(nn.Module):
    """A decoder of 2 layers and 0.2 million parameters; every process starts from the same ones."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(DIGITS, width), nn.Embedding(PROMPT + ANSWER, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, DIGITS)
        self.register_buffer("version", torch.tensor(0))  # how many steps it was trained
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

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
