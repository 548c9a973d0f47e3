"""OpenVINO's runtime on a folder that export_openvino.py wrote.

    python openvino_driver.py FOLDER FORMAT

The head is moved behind a slice of the last position, as OpenVINO's own generation pipeline does:
without it a prefill would compute the logits of every prompt token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
from openvino import opset13
from serve import Job, arguments, clock, serve


def keep_last_logits(model: openvino.Model) -> bool:
    """Slices the input of the head's matmul to the last position; False if there is none."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            return False
        node = node.input_value(0).get_node()
    hidden = node.input_value(0)
    ends = [np.array([value], np.int64) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
    node.input(0).replace_source_output(opset13.slice(hidden, *ends).output(0))
    model.validate_nodes_and_infer_types()
    return True


class OpenVINO:
    def __init__(self, folder: str, threads: int):
        core = openvino.Core()
        model = core.read_model(f"{folder}/openvino_model.xml")
        self.sliced = keep_last_logits(model)
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.compiled = core.compile_model(model, "CPU", settings)
        self.inputs = {i.get_any_name() for i in self.compiled.inputs}

    def about(self) -> dict[str, Any]:
        names = ("KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS")
        settings = {name.lower(): str(self.compiled.get_property(name)) for name in names}
        version = openvino.get_version().split("-")[0]
        return {"version": version, "last_logits_only": self.sliced, **settings}

    def open(self, job: Job) -> dict[str, Any]:
        self.job = job
        return self.trial()

    def trial(self) -> dict[str, Any]:
        self.request = self.compiled.create_infer_request()
        return clock(self._prefill, self._decode)

    def _prefill(self) -> None:
        prompts = [self.job.prompt(row) for row in range(self.job.batch)]
        self._run(np.array(prompts, np.int64), 0)

    def _decode(self) -> None:
        for step in range(self.job.new_tokens):
            ids = np.full((self.job.batch, 1), step * 13 + 5, np.int64)
            self._run(ids, self.job.prompt_tokens + step)

    def _run(self, ids: np.ndarray, first: int) -> np.ndarray:
        rows, count = ids.shape
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((rows, first + count), np.int64),
            "position_ids": np.tile(np.arange(first, first + count), (rows, 1)),
            "beam_idx": np.arange(rows, dtype=np.int32),
        }
        given = {name: value for name, value in feed.items() if name in self.inputs}
        self.request.start_async(given, share_inputs=True)
        self.request.wait()
        return self.request.get_tensor("logits").data[:, -1].argmax(-1)


if __name__ == "__main__":
    args = arguments(__doc__)
    serve(lambda: OpenVINO(args.model, args.threads))
