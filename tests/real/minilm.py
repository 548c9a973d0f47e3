"""Writes tests/real/minilm.json by sentence-transformers: `python -m tests.real.minilm FOLDER`.

What it computes of the unpacked all-MiniLM-L6-v2 stands in for it where torch is not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")
TEXTS = (
    "The capital of France is Paris.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "x",
    "How do I sort a list of numbers in Python? " * 20,
)
KEPT = 24
"""Numbers of each vector that are committed."""


def theirs(folder: str) -> np.ndarray:
    """Vectors by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu").encode(list(TEXTS))


if __name__ == "__main__":
    rows = [[round(float(x), 8) for x in row] for row in theirs(sys.argv[1])[:, :KEPT]]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
