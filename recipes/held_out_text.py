"""Writes the held-out text that perplexity is stated on: whole files that training never saw.

    python recipes/held_out_text.py --corpus OUT/corpus.json --to tests/data/python_held_out.txt

Takes library files (no test suites, none above 40 KB) of the held-out tenth, in the order of their
names' hashes, as long as the text stays within 200 KB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

MOST_BYTES = 200_000
LARGEST_FILE = 40_000
TEST_PARTS = {"test", "tests", "idle_test", "encodings", "pydoc_data"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.json of a run")
    parser.add_argument("--to", type=Path, required=True, help="the text file to write")
    args = parser.parse_args()
    names = json.loads(args.corpus.read_text(encoding="utf-8"))["held_out"]["files"]
    args.to.write_text(held_out_text(names), encoding="utf-8", newline="")


def held_out_text(names: list[str]) -> str:
    """The chosen files' texts, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for name in sorted(names, key=lambda n: hashlib.sha256(n.encode()).digest()):
        if TEST_PARTS & set(Path(name).parts):
            continue
        text = (folder / name).read_text(encoding="utf-8")
        num_bytes = len(text.encode())
        if num_bytes <= LARGEST_FILE and size + num_bytes <= MOST_BYTES:
            texts.append(text)
            size += num_bytes
    return "".join(texts)


if __name__ == "__main__":
    main()
