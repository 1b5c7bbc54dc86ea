"""A DataProto through the plane: prints what came back, and the error of what does not join."""

from __future__ import annotations

import json

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

import dataplane
from dataplane.integrations import verl


def data(start: int, temperature: float) -> DataProto:
    ids = np.empty(2, object)
    ids[:] = [[1, 2, start], [3]]
    return DataProto(
        batch=TensorDict(
            {
                "input_ids": torch.arange(start, start + 6).reshape(2, 3),
                "log_probs": torch.full((2, 3), 0.5, dtype=torch.bfloat16),
                "score": torch.tensor([1.0, float(start)]),
            },
            batch_size=2,
        ),
        non_tensor_batch={
            "raw_prompt_ids": ids,
            "uid": np.array([f"u{start}", f"v{start}"], dtype=object),
            "index": np.array([start, start + 1]),
            "multi_modal_inputs": np.array(
                [{"pixel_values": torch.ones(4)}, {"a": (1, None)}], dtype=object
            ),
        },
        meta_info={"temperature": temperature, "eos": [1, 2]},
    )


def main() -> None:
    with dataplane.connect() as plane:
        part = plane.partition("train", stages={"t": ["input_ids"]})
        verl.put(part, data(0, 1.0), key=["a", "b"])
        verl.put(part, data(10, 1.0), key=["c", "d"])
        verl.put(part, data(20, 0.5), key=["e", "f"])
        joined = verl.dataproto(part.get(["a", "b", "c", "d"]))
        try:
            verl.dataproto(part.get(["a", "f"]))
            error = ""
        except ValueError as exc:
            error = str(exc)
        with part.claim("t", rows=2) as batch:
            claimed = verl.dataproto(batch)
        both = DataProto.concat([data(0, 1.0), data(10, 1.0)])
        print(
            "RESULTS "
            + json.dumps(
                {
                    "tensors": all(
                        torch.equal(joined.batch[name], both.batch[name])
                        and joined.batch[name].dtype == both.batch[name].dtype
                        for name in sorted(both.batch.keys())
                    ),
                    "names": [sorted(joined.batch.keys()), sorted(joined.non_tensor_batch)],
                    "raw_prompt_ids": joined.non_tensor_batch["raw_prompt_ids"].tolist(),
                    "index": [
                        str(joined.non_tensor_batch["index"].dtype),
                        joined.non_tensor_batch["index"].tolist(),
                    ],
                    "media": type(
                        joined.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"]
                    ).__name__,
                    "tuple": joined.non_tensor_batch["multi_modal_inputs"][1]["a"] == (1, None),
                    "meta_info": joined.meta_info,
                    "error": error,
                    "claimed": [len(claimed), claimed.meta_info == joined.meta_info],
                }
            )
        )


if __name__ == "__main__":
    main()
