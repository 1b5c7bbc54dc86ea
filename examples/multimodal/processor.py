"""Turn pictures into rows of patches, as a vision model such as Qwen2-VL reads them.

Shapes follow its image processor (arXiv 2409.12191): sides rounded to multiples of 28, patches of
14 x 14 pixels, each picture repeated twice in time, the patches of one visual token next to each
other.
"""

from __future__ import annotations

import math

import numpy as np
from skimage.transform import resize

PATCH, TEMPORAL, MERGE = 14, 2, 2
SIDE = PATCH * MERGE  # side of a visual token, in pixels
FEWEST, MOST = 4 * SIDE**2, 1280 * SIDE**2  # limits of a picture, in pixels
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # CLIP's, by channel
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def sides(height: int, width: int) -> tuple[int, int]:
    """Return sides that are multiples of 28, with a similar ratio and FEWEST to MOST pixels."""
    scale = 1.0
    if height * width > MOST:
        scale = math.sqrt(MOST / (height * width))
    elif height * width < FEWEST:
        scale = math.sqrt(FEWEST / (height * width))
    to = math.floor if scale < 1 else math.ceil if scale > 1 else round
    return max(SIDE, to(height * scale / SIDE) * SIDE), max(SIDE, to(width * scale / SIDE) * SIDE)


def process(picture: np.ndarray) -> dict[str, np.ndarray]:
    """Turn a picture, uint8 [height, width, 3], into `pixel_values`, float32
    [grid_t·grid_h·grid_w, 1176], and `image_grid_thw`, int64 [3]."""
    height, width = sides(*picture.shape[:2])
    scaled = resize(picture, (height, width), order=3, anti_aliasing=True).astype(np.float32)
    normal = ((scaled - MEAN) / STD).transpose(2, 0, 1)  # [3, height, width]
    rows, columns = height // PATCH, width // PATCH
    blocks = normal.reshape(3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    #                       c  h              m_h    p_h    w                 m_w    p_w
    tokens = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, PATCH * PATCH)
    patches = np.broadcast_to(tokens, (rows * columns, 3, TEMPORAL, PATCH * PATCH))
    grid = np.array([1, rows, columns])
    return {"pixel_values": patches.reshape(rows * columns, -1), "image_grid_thw": grid}
