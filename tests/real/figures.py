"""Takes figures of published models again: `python -m tests.real.figures PYTHON`.

PYTHON has llama-cpp-python (benchmarks/peers/install.sh). Writes figures.json: of each file the
nats per token of the English text, by transformers in float32 and by llama.cpp in the file's own
format, and sums of llama.cpp's token ids of the lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from rooflax.loading.model_info import model_info
from tests.real.fetch import GEMMA, SMOLLM2
from tests.real.texts import HERE, lines, windows

FILE = HERE / "figures.json"
PEERS = HERE.parents[1] / "benchmarks" / "peers"
AT_ONCE = 100


def sums(ids: list[list[int]]) -> list[int]:
    """CRC-32 of the ids of each hundred lines."""
    hundreds = (ids[i : i + AT_ONCE] for i in range(0, len(ids), AT_ONCE))
    return [zlib.crc32(json.dumps(some).encode()) for some in hundreds]


def main() -> None:
    from tests.real.oracle import Oracle, nats

    python = sys.argv[1]
    figures = {}
    for model in (SMOLLM2, GEMMA):
        with tempfile.TemporaryDirectory() as folder:
            texts, ids, text_ids = (Path(folder) / name for name in ("texts", "ids", "text.npy"))
            texts.write_text(json.dumps(lines()))
            text = windows(model_info(model.path).tokenizer())
            np.save(text_ids, np.array(text, np.int32))
            tokenize = [python, PEERS / "llama_cpp_tokens.py", model.path, texts, ids]
            subprocess.run(tokenize, check=True)
            score = [python, PEERS / "llama_cpp_loss.py", model.path, text_ids]
            ran = subprocess.run(score, check=True, stdout=subprocess.PIPE, text=True)
            oracle = Oracle(model.path)
            figures[model.path.stem] = {
                "float32": float(np.mean([nats(oracle.logits(window), window) for window in text])),
                "llama.cpp": float(ran.stdout),
                "sums": sums(json.loads(ids.read_text())),
            }
    FILE.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
