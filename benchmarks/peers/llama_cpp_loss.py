"""llama.cpp's nats of given token ids, each after those before it in its window.

    python llama_cpp_loss.py MODEL.gguf IDS.npy

IDS is int32 [windows, tokens]. Prints the mean over all but the first tokens of the windows.
"""

from __future__ import annotations

import argparse

import numpy as np
from llama_cpp_logits import logits_of, open_context


def nats(logits: np.ndarray, ids: np.ndarray) -> float:
    """Sum of -log p of the window's tokens but the first, in float64."""
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    chosen = wide[np.arange(len(wide)), ids[1:]]
    return float((np.log(np.exp(wide).sum(-1)) - chosen).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    windows = np.load(args.ids)
    _log, model, context = open_context(args.model, windows.shape[1], args.threads)
    found = logits_of(windows, model, context)
    total = sum(nats(logits, ids) for logits, ids in zip(found, windows, strict=True))
    print(total / windows[:, 1:].size)


if __name__ == "__main__":
    main()
