"""What requests gave in 0.1.0, whose steps were rectangles; lists of tokens must give the same.

    python -m tests.support.engine.pinned > tests/data/pinned_tokens.json

wrote the file with that version's code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rooflax import LLM, SamplingParams
from tests import goldens

PROMPTS = [[3, 1, 4, 1, 5], list(range(40, 57)), [250], [7, 8, 9] * 12, list(range(100, 130))]
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
DRAWN = {"temperature": 1.1, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True, "seed": 11}
FAMILIES = ("gpt2", "llama_gqa", "qwen2_window", "gpt_oss")


def scenarios(folder: Path, families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    """Per scenario the tokens of every prompt, or numbers.

    Args:
        folder: for checkpoints.
    """
    found: dict[str, Any] = {}
    for family in families:
        path = goldens.write_checkpoint(folder / family, family, goldens.committed(family))
        llm = LLM(path, max_num_seqs=4)
        for name, given in (("greedy", GREEDY), ("drawn", DRAWN)):
            found[f"{family} {name}"] = tokens(llm, **given)
        found[f"{family} beams"] = tokens(llm, **GREEDY, num_beams=3, n=2)
        found[f"{family} scores"] = [[float(x) for x in row] for row in llm.score(PROMPTS[1::2])]
        drafting = LLM(path, max_num_seqs=4, speculate="ngram")
        found[f"{family} drafts"] = tokens(drafting, **GREEDY)
        found[f"{family} drawn drafts"] = tokens(drafting, **DRAWN)
        budget = int(0.8 * llm.model.weights_bytes)
        found[f"{family} offloaded"] = tokens(LLM(path, weights_budget=budget), **GREEDY)
    return found


def tokens(llm: LLM, **given: Any) -> list[list[int]]:
    return [list(c.tokens) for c in llm.generate(PROMPTS, SamplingParams(**given))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        json.dump(scenarios(Path(name)), sys.stdout)
