"""llama.cpp's token ids of texts, special tokens read as such and BOS as the file says.

    python llama_cpp_tokens.py MODEL.gguf TEXTS.json IDS.json

TEXTS is a list of strings; IDS becomes a list of lists.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("ids")
    args = parser.parse_args()
    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, None)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for text in json.loads(Path(args.texts).read_text()):
        data = text.encode()
        most = len(data) + 8
        ids = (ctypes.c_int32 * most)()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, most, True, True)
        if count < 0:
            raise SystemExit(f"llama.cpp needs {-count} tokens for {text!r}")
        found.append(list(ids[:count]))
    Path(args.ids).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
