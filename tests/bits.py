"""Whether two versions of this project compute the same bits.

In the older one's checkout, then in this one:
    python -m tests.bits FOLDER old.npz
    python -m tests.bits FOLDER new.npz --against old.npz

FOLDER gets the checkpoints, once, so that both read the same. Where a version does not have this
file, copy it there: all that it needs of the project is as old as 0.1.0.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

from rooflax import LLM, SamplingParams
from rooflax.models.steps import decode_step, new_cache, prefill
from tests import goldens

VARIANTS = ("gpt2", "llama_gqa", "qwen2_window", "gpt_oss")
FORMATS = (None, "int8", "int4", "mxfp4")
LENGTHS, PREFIX = (19, 7, 12), 8


def computed(folder: Path) -> dict[str, np.ndarray]:
    """Logits of prompts, whole and from a prefix on token by token; log-probabilities of prompts of
    unequal lengths in one batch, and of 24 greedy tokens after them."""
    tokens = np.random.default_rng(0).integers(0, 60, (3, max(LENGTHS))).astype(np.int32)
    prompts = [row[:count].tolist() for row, count in zip(tokens, LENGTHS, strict=True)]
    params = SamplingParams(
        temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    found = {}
    for variant in VARIANTS:
        checkpoint = folder / variant
        if not checkpoint.exists():
            goldens.write_checkpoint(checkpoint, variant, goldens.committed(variant))
        for format in FORMATS:
            llm, key = LLM(checkpoint, quantize=format), f"{variant}/{format}"
            run, step = (jax.jit(partial(f, options=llm.options)) for f in (prefill, decode_step))
            cache = new_cache(llm.model, rows=3, max_tokens=32, options=llm.options)
            first, cache = run(llm.model, cache, tokens[:, :PREFIX])
            logits = [first]
            for at in range(PREFIX, tokens.shape[1]):
                where = np.full(3, at, np.int32)
                one, cache = step(llm.model, cache, tokens[:, at], where)
                logits.append(one)
            found[f"{key}/logits"] = np.stack(logits)
            cache = new_cache(llm.model, rows=3, max_tokens=32, options=llm.options)
            found[f"{key}/whole"] = np.asarray(run(llm.model, cache, tokens)[0])
            for number, one in enumerate(llm.generate(prompts, params)):
                where = f"{key}/batched/{number}"
                found[f"{where}/tokens"] = np.array(one.tokens)
                for kind, each in (("answer", one.logprobs), ("prompt", one.prompt_logprobs)):
                    found[f"{where}/{kind}"] = np.array([entry.logprob for entry in each])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file")
    parser.add_argument("--against", metavar="FILE")
    args = parser.parse_args()
    found = computed(args.folder)
    np.savez(args.file, **found)
    if args.against is None:
        return 0
    other = np.load(args.against)
    names = sorted(found.keys() | set(other.files))
    differ = [
        name
        for name in names
        if name not in found or name not in other or not np.array_equal(found[name], other[name])
    ]
    numbers = sum(array.size for array in found.values())
    print(f"{len(found)} arrays of {numbers} numbers; {len(differ)} differ")
    print("\n".join(differ), end="\n" if differ else "")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
