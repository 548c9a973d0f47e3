"""What a model costs: `python -m tests.real.cost MODEL` prints seconds and bytes as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rooflax import LLM


def peak_bytes() -> int:
    """The most memory that this process had at once."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024


def main() -> None:
    began = time.perf_counter()
    llm = LLM(sys.argv[1])
    load_s = time.perf_counter() - began
    llm.generate("The capital of France is", max_tokens=4, temperature=0)
    found = {"load_s": load_s, "weights": llm.model.weights_bytes, "peak": peak_bytes()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
