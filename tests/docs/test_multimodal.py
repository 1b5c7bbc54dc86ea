"""The example with photographs: its processor's shapes, and what its figures say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("skimage", reason="make test installs it")

EXAMPLE = Path(__file__).parents[2] / "examples" / "multimodal"


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(512, 512, 36, 36), (300, 451, 22, 32), (1411, 1411, 70, 70), (20, 30, 4, 6)],
)
def test_a_picture_becomes_patches(height: int, width: int, rows: int, columns: int) -> None:
    processor = runpy.run_path(str(EXAMPLE / "processor.py"))
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    made = processor["process"](picture)
    assert made["image_grid_thw"].tolist() == [1, rows, columns]
    values = made["pixel_values"]
    assert values.dtype == np.float32 and values.shape == (rows * columns, 1176)
    channels = values.reshape(-1, 3, 2, 14, 14)
    assert (channels[:, :, 0] == channels[:, :, 1]).all()  # the picture twice in time


def test_four_patches_of_a_visual_token_lie_next_to_each_other() -> None:
    processor = runpy.run_path(str(EXAMPLE / "processor.py"))
    picture = np.zeros((112, 112, 3), np.uint8)
    picture[:28, 28:56] = 255  # the second token of the first row
    white = processor["process"](picture)["pixel_values"][:, 100] > 0
    assert np.flatnonzero(white).tolist() == [4, 5, 6, 7]


@pytest.mark.timeout(180)
def test_the_media_of_a_group_are_kept_once_and_cross_once(run_dir: Path) -> None:
    environment = {**os.environ, "DATAPLANE_LINGER": "1"}
    command = [sys.executable, str(EXAMPLE / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    read, crossed = map(int, re.findall(r"read (\d+) MiB, and pulled (\d+) MiB", done.stdout)[0])
    (kept,) = map(int, re.findall(r"stored (\d+) MiB", done.stdout))
    assert read > 7 * crossed and abs(kept - crossed) <= 1
