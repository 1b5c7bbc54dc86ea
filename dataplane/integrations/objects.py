"""Convert Python objects that frameworks put to values of the plane, and back.

NumPy arrays of objects or text, and PIL images, become dicts of values that the plane can store.
A mapping of any class is read back as a dict. All other values stay as they are. If the plane
cannot store one, its error names the path in the value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from dataplane.wire.objects import uneven_keys

_ARRAY, _TEXTS, _IMAGE = "\0array", "\0texts", "\0image"


def check_even(fields: TensorDict) -> None:
    """Raise ValueError if the rows of a TensorDict have different fields. The TensorDict itself
    shows only the fields that all rows have."""
    if (odd := uneven_keys(fields)) is not None:
        raise ValueError(
            f"row {odd[2]} has field {odd[0]!r}, but row {odd[1]} does not: put rows with "
            "different fields in separate calls"
        )


def packed_object(value: Any, other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Convert a value to types that the plane stores. If a value cannot be stored, the
    error names its path. `other` converts values of all other classes."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, NonTensorData):
        return packed_object(value.data, other)
    masked = isinstance(value, np.ma.MaskedArray)  # the plane rejects it
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU" and not masked:
        entries = value.ravel().tolist()
        if value.dtype.kind == "O":
            return {_ARRAY: [packed_object(one, other) for one in entries], "shape": value.shape}
        return {_TEXTS: entries, "shape": value.shape, "dtype": value.dtype.str}
    if isinstance(value, Mapping):
        return {key: packed_object(one, other) for key, one in value.items()}
    if isinstance(value, list):
        return [packed_object(one, other) for one in value]
    if type(value) is tuple:
        return tuple(packed_object(one, other) for one in value)
    if isinstance(value, np.str_ | np.bytes_):
        return value.item()
    pictures = sys.modules.get("PIL.Image")
    if pictures is not None and isinstance(value, pictures.Image):
        return _packed_image(value)
    return other(value)


def _packed_image(image: Any) -> dict[str, Any]:
    """Convert a PIL image, as in the messages of a verl prompt. An array of numbers would lose its
    mode and palette, and image processors do not accept one."""
    pixels = np.frombuffer(image.tobytes(), np.uint8)
    told = {_IMAGE: pixels, "mode": image.mode, "size": image.size}
    if image.palette is not None:
        told["palette"] = [image.palette.mode, bytes(image.getpalette(image.palette.mode))]
    if "transparency" in image.info:
        told["transparency"] = image.info["transparency"]
    return told


def unpacked_object(value: Any, other: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value that was given to `packed_object`, as a private copy. `other` receives
    each dict, with its entries unpacked, and returns the value that the dict represents."""
    if isinstance(value, dict):
        if _ARRAY in value:
            made = np.empty(len(value[_ARRAY]), object)
            made[:] = [unpacked_object(one, other) for one in value[_ARRAY]]
            return made.reshape(value["shape"])
        if _TEXTS in value:
            return np.array(value[_TEXTS], value["dtype"]).reshape(value["shape"])
        if _IMAGE in value:
            return _image(value)
        entries = {key: unpacked_object(one, other) for key, one in value.items()}
        return entries if other is None else other(entries)
    if isinstance(value, list):
        return [unpacked_object(one, other) for one in value]
    if isinstance(value, tuple):
        return tuple(unpacked_object(one, other) for one in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _image(told: dict[str, Any]) -> Any:
    from PIL import Image

    (width, height), pixels = told["size"], told[_IMAGE]
    if width * height > 8 * pixels.nbytes:  # PIL would first allocate memory for all of them
        raise ValueError(
            f"the stored image is truncated: {pixels.nbytes} bytes are too few for {width} x "
            f"{height} pixels. Put the image again"
        )
    made = Image.frombytes(told["mode"], (width, height), pixels.data)
    if "palette" in told:
        mode, colours = told["palette"]
        made.putpalette(colours, mode)
    if "transparency" in told:
        made.info["transparency"] = told["transparency"]
    return made
