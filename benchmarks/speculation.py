"""What n-gram drafts bring on repetitive code, with the embedded model.

`python benchmarks/speculation.py`
The same requests with and without drafts, interleaved; tokens must be equal. Prints one line per
prompt and the geometric mean, and exits with 1 if a token differs or the mean is below 1.5.
"""

from __future__ import annotations

import math
import statistics
import sys

from rooflax import LLM, SamplingParams

LEAST_SPEEDUP = 1.5
TRIALS = 5


def accessors(name: str, fields: list[str]) -> str:
    """A class of getters and setters, as people write them."""
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += [f"\n    def get_{field}(self):\n        return self.{field}"]
        lines += [f"\n    def set_{field}(self, {field}):\n        self.{field} = {field}"]
    return "\n".join(lines) + "\n\n\n"


PROMPTS = {
    "accessors": accessors("Point", ["x", "y"]) + accessors("Size", ["x", "y"]) + "class Box:\n",
    "tests": "".join(
        f"    def test_{name}(self):\n        self.assertEqual({name}(1, 2), 3)\n\n"
        for name in ("add", "sub", "mul", "div", "add")
    )
    + "    def test_",
    "table": "VALUES = {\n" + "".join(f'    "key{n}": ("name{n}", {n}),\n' for n in range(12)),
}


def main() -> int:
    llms = {"without": LLM(max_num_seqs=1), "with": LLM(max_num_seqs=1, speculate="ngram")}
    params = SamplingParams(temperature=0.0, max_tokens=320, ignore_eos=True)
    ratios, is_equal = [], True
    for name, prompt in PROMPTS.items():
        speeds: dict[str, list[float]] = {"without": [], "with": []}
        for trial in range(TRIALS + 1):
            done = {key: llm.generate(prompt, params)[0] for key, llm in llms.items()}
            is_equal &= done["with"].tokens == done["without"].tokens
            for key, completion in done.items():
                if trial:  # the first one warms up
                    speeds[key].append(completion.timings["decode_tok_per_s"])
        plain, drafted = (statistics.median(speeds[key]) for key in ("without", "with"))
        held, drafts = done["with"].num_accepted_tokens, done["with"].num_draft_tokens
        ratios.append(drafted / plain)
        print(
            f"{name:10} {plain:8,.0f} -> {drafted:8,.0f} tok/s, {drafted / plain:.2f}x, "
            f"{held} of {drafts} drafts held"
        )
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"geometric mean {mean:.2f}x; tokens {'equal' if is_equal else 'DIFFER'}")
    return 0 if is_equal and mean >= LEAST_SPEEDUP else 1


if __name__ == "__main__":
    sys.exit(main())
