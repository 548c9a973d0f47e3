"""llama.cpp by llama-cpp-python's low-level calls: prompts and steps alone, no text, no sampling.

python llama_cpp_driver.py MODEL.gguf FORMAT
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import llama_cpp
from llama_cpp_server import Server
from serve import Job, ServingJob, arguments, clock, serve

MICRO_BATCH = 512
SPARE_TOKENS = 256


class LlamaCpp:
    def __init__(self, path: str, threads: int):
        self.threads = threads
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.context = self.batch = None

    def about(self) -> dict[str, Any]:
        return {
            "version": importlib.metadata.version("llama-cpp-python"),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
            "weights_bytes": llama_cpp.llama_model_size(self.model),
        }

    def open(self, job: Job) -> dict[str, Any]:
        self._close()
        self.job = job
        tokens = job.batch * job.prompt_tokens
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = tokens + job.batch * job.new_tokens + SPARE_TOKENS * job.batch
        params.n_batch, params.n_ubatch = max(MICRO_BATCH, tokens), MICRO_BATCH
        params.n_seq_max = job.batch
        params.n_threads = params.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        return self.trial()

    def trial(self) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        return clock(self._prefill, self._decode)

    def open_serving(self, job: ServingJob) -> dict[str, Any]:
        self._close()
        self.server = Server(self.model, self.threads, job)
        return self.server.run([0.0] * job.requests)

    def serve(self, by: str, arrivals: list[float]) -> dict[str, Any]:
        return self.server.run(arrivals)

    def _prefill(self) -> None:
        last = self.job.prompt_tokens - 1
        self._run(
            [
                (token, position, row, position == last)
                for row in range(self.job.batch)
                for position, token in enumerate(self.job.prompt(row))
            ]
        )

    def _decode(self) -> None:
        first = self.job.prompt_tokens
        for step in range(self.job.new_tokens):
            self._run([(step * 13 + 5, first + step, row, True) for row in range(self.job.batch)])

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """A step of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, row, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if llama_cpp.llama_decode(self.context, batch):
            raise ValueError("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)

    def _close(self) -> None:
        if self.context is not None:
            llama_cpp.llama_batch_free(self.batch)
            llama_cpp.llama_free(self.context)
            self.context = self.batch = None


if __name__ == "__main__":
    args = arguments(__doc__)
    serve(lambda: LlamaCpp(args.model, args.threads))
