"""llama.cpp's logits of given token ids, through llama-cpp-python's low-level calls.

    python llama_cpp_logits.py MODEL.gguf IDS.npy LOGITS.npy

IDS is int32 [windows, tokens]; LOGITS becomes float32 [windows, tokens, vocab]. The KV cache is
float32 and flash attention is off, so that what is measured is how the weights are multiplied.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator

import llama_cpp
import numpy as np

F32 = 0


def open_context(path: str, tokens: int, threads: int):
    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, None)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = tokens
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return log, model, llama_cpp.llama_init_from_model(model, params)


def logits_of(windows: np.ndarray, model, context) -> Iterator[np.ndarray]:
    """Of each window [tokens, vocab], a view that the next one overwrites."""
    tokens = windows.shape[1]
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(tokens, 0, 1)
    for window, ids in enumerate(windows):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = tokens
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot decode window {window}")
        found = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        yield np.ctypeslib.as_array(found, (tokens, vocab))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("logits")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    windows = np.load(args.ids)
    _log, model, context = open_context(args.model, windows.shape[1], args.threads)
    np.save(args.logits, np.stack([found.copy() for found in logits_of(windows, model, context)]))


if __name__ == "__main__":
    main()
