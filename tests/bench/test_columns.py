"""The columns of a row: shapes, bytes, and who is sent what."""

from __future__ import annotations

import numpy as np
import pytest

from bench.columns import (
    Source,
    group_bytes,
    rollout_fields,
    shape_of,
    stage_fields,
    value_bytes,
)
from bench.traces import TASKS, generate


@pytest.mark.parametrize("name", ["video", "image", "image_open"])
def test_fields_have_the_shapes_of_a_verl_row(name: str) -> None:
    prompt = generate(TASKS[name], 1, seed=7)[0]
    response = prompt.response_tokens[3]
    total = prompt.prompt_tokens + response
    shapes = {field.name: shape_of(field, prompt, 3) for field in rollout_fields(TASKS[name])}
    assert shapes["input_ids"] == shapes["attention_mask"] == (total,)
    assert shapes["position_ids"] == (3, total)
    assert shapes["responses"] == shapes["old_log_probs"] == (response,)
    assert shapes["pixel_values"] == (sum(m.pixel_rows for m in prompt.media), 1176)
    assert shapes["image_grid_thw"] == (len(prompt.media), 3)


def test_dedup_counts_the_media_of_a_group_once() -> None:
    prompt = generate(TASKS["video"], 1, seed=7)[0]
    fields = rollout_fields(TASKS["video"])
    media = sum(value_bytes(f, prompt, 0) for f in fields if f.name == "pixel_values")
    assert media == prompt.media_bytes
    assert group_bytes(fields, prompt, False) - group_bytes(fields, prompt, True) == 7 * media


def test_a_stage_is_sent_what_it_reads() -> None:
    sent = stage_fields(TASKS["video"])
    assert "pixel_values" not in sent["reward"]
    assert "pixel_values" in sent["reference"]  # a model that sees what the policy saw
    assert {"reward", "token_level_scores", "ref_log_prob"} <= set(sent["train"])
    assert all("uid" in fields for fields in sent.values())


@pytest.mark.parametrize("name", TASKS)
def test_every_value_has_the_shape_that_is_counted(name: str) -> None:
    prompt = generate(TASKS[name], 1, seed=1)[0]
    source = Source(seed=0)
    for field in rollout_fields(TASKS[name]):
        for sample, value in enumerate(source.column(field, prompt)):
            assert value.shape == shape_of(field, prompt, sample)
            assert value.nbytes == value_bytes(field, prompt, sample)


def test_tool_texts_are_masked() -> None:
    prompt = generate(TASKS["search"], 1, seed=1)[0]
    (field,) = (f for f in rollout_fields(TASKS["search"]) if f.name == "response_mask")
    for sample, mask in zip(prompt.samples, Source(seed=0).column(field, prompt), strict=True):
        assert mask.sum() == sum(turn.tokens for turn in sample.turns)
        assert (mask[: sample.turns[0].tokens] == 1).all()
        assert len(sample.turns) == 1 or mask[sample.turns[0].tokens] == 0


def test_equal_media_have_equal_bytes() -> None:
    first, second = generate(TASKS["image_open"], 2, seed=1)
    (field,) = (f for f in rollout_fields(TASKS["image_open"]) if f.name == "pixel_values")
    source = Source(seed=0)
    values = [source.value(field, prompt, 0) for prompt in (first, second, first)]
    assert np.array_equal(values[0], values[2])
    assert not np.array_equal(values[0][:100], values[1][:100])
