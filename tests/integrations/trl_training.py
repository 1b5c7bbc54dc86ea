"""A rank of trl's GRPOTrainer under torchrun, or, with `worker`, one that makes its rollouts.

    python trl_training.py FOLDER worker [die]
    torchrun --nproc-per-node 2 trl_training.py FOLDER

The model is tiny and random, the tokenizer is made here: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

import dataplane
from dataplane.integrations.trl import Rollouts

WORDS = ["<pad>", "<eos>", *"abcdefgh"]
STEPS, GROUP, LENGTH = 3, 4, 6


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


class Weights(TrainerCallback):  # type: ignore[misc]
    """Those of each step in a folder, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.is_world_process_zero:
            file = self.folder / f"weights-{state.global_step}"
            torch.save(named["model"].state_dict(), file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)


def worker(folder: Path, dies: bool) -> None:
    torch.set_num_threads(1)
    words, network, version = tokenizer(), model(), 0
    torch.seed()
    made: list[list[int]] = []
    with dataplane.connect() as plane:
        for batch in Rollouts(plane, fields=["by"]).requests(rows=4):
            if dies and made:
                os.kill(os.getpid(), signal.SIGKILL)
            (wanted,) = set(batch.tags["version"])
            assert isinstance(wanted, int)
            if wanted != version:
                network.load_state_dict(torch.load(folder / f"weights-{wanted}"))
                version = wanted
            answers = [answer(network, words(prompt)["input_ids"]) for prompt in batch["prompt"]]
            made.append([version, len(batch)])
            batch.add({name: [one[name] for one in answers] for name in answers[0]})
            batch.add(by=[os.getpid()] * len(batch))
    print(json.dumps(made))


@torch.no_grad()
def answer(network: Qwen2ForCausalLM, prompt: list[int]) -> dict[str, list[Any]]:
    ids, logprobs = list(prompt), []
    for _ in range(LENGTH):
        chances = network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(torch.multinomial(chances.exp(), 1)))
        logprobs.append(float(chances[ids[-1]]))
    return {"prompt_ids": prompt, "completion_ids": ids[len(prompt) :], "logprobs": logprobs}


def train(folder: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    makers: set[int] = set()

    def as_many_a(completions: list[str], by: list[int], **told: Any) -> list[float]:
        makers.update(by)
        return [float(text.split().count("a")) for text in completions]

    with dataplane.connect() as plane:
        rollouts = Rollouts(plane, fields=["by"])
        trainer = GRPOTrainer(
            model(),
            as_many_a,
            args=GRPOConfig(
                str(folder / "out"),
                per_device_train_batch_size=GROUP,
                num_generations=GROUP,
                max_completion_length=LENGTH,
                max_steps=STEPS,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                learning_rate=1e-3,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a b", "c", "d e f", "g h", "b", "e"]}),
            processing_class=tokenizer(),
            rollout_func=rollouts,
            callbacks=[Weights(folder)],
        )
        trainer.train()
        log = [line for line in trainer.state.log_history if "reward" in line]
        told = {"steps": len(log), "rewards": [line["reward"] for line in log]}
        told |= {"makers": sorted(makers), "loss": all("loss" in line for line in log)}
        rank = trainer.accelerator.process_index
        (folder / f"rank-{rank}.json").write_text(json.dumps(told))
        trainer.accelerator.wait_for_everyone()
        rollouts.end()


if __name__ == "__main__":
    if sys.argv[2:3] == ["worker"]:
        worker(Path(sys.argv[1]), "die" in sys.argv)
    else:
        train(Path(sys.argv[1]))
