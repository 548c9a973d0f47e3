"""`rooflax verify`: is what rooflax computes what the reference computes?

The reference is transformers, if it is installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser, at_least_one
from rooflax.cli.session import open_llm
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError

if TYPE_CHECKING:
    from rooflax.llm import LLM

TOLERANCE = 1e-4
DEFAULT_TOKENS = 16
GGUF = (
    "{} is a GGUF file, whose metadata transformers reads only in part; verify the checkpoint it "
    "was made from."
)
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os",
    "The quick brown fox jumps over the lazy dog. It was a bright cold day in April, and",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
)


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    group = parser.group("what to compare")
    group.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        action="append",
        help="prompt in place of the built-in ones (repeatable)",
    )
    group.add_argument(
        "-n", "--max-tokens", metavar="N", type=at_least_one, default=DEFAULT_TOKENS,
        help=f"greedy tokens per prompt; default {DEFAULT_TOKENS}",
    )  # fmt: skip
    flags.add_weights_budget(parser)
    flags.add_execution(parser)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """0 if everything is equal, 1 if not."""
    args.dtype = "float32"
    if str(args.model).endswith(".gguf"):  # known before it is loaded
        raise RequestError(GGUF.format(args.model))
    transformers = _import_transformers()
    llm = open_llm(args)
    if llm.info.folder is None:
        raise RequestError(f"{llm.info.name} has no files that transformers could open.")
    if llm.info.gguf is not None:
        raise RequestError(GGUF.format(llm.info.name))
    prompts = encoded_prompts(llm, args.prompt or PROMPTS, args.max_tokens)
    with terminal.status("running transformers", args.quiet):
        theirs = _Reference(transformers, llm.info.folder, prompts, args.max_tokens)
    comparison = compare(llm, prompts, theirs.logits, theirs.tokens, args.max_tokens)
    if args.json:
        terminal.print_json(comparison)
    else:
        for line in lines(comparison):
            print(line)
    return 0 if comparison["equal"] else 1


def _import_transformers() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RequestError(
            f"verify needs transformers and torch ({error}); install them with "
            f"pip install transformers torch."
        ) from None
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def encoded_prompts(llm: LLM, texts: Any, max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, all that leave room for the new tokens.

    Raises:
        RequestError: a prompt that leaves none.
    """
    prompts = [llm.encode(text) for text in texts]
    for text, ids in zip(texts, prompts, strict=True):
        if not ids or len(ids) + max_tokens > llm.max_model_len:
            raise RequestError(
                f"the prompt {text[:30]!r} has {len(ids)} tokens; with {max_tokens} new ones it "
                f"must have at least 1 and fit into {llm.max_model_len}."
            )
    return prompts


class _Reference:
    """Reference computed by transformers in float32: logits of each prompt, and greedy tokens."""

    def __init__(self, transformers: Any, folder: Path, prompts: list[list[int]], count: int):
        import torch  # pyright: ignore[reportMissingImports]

        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                attn_implementation="eager",  # a config may name a repository of kernels
            ).eval()  # fmt: skip
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RequestError(f"transformers does not open {folder}: {reason}") from None
        self.logits, self.tokens = [], []
        for prompt in prompts:
            self._run(torch, prompt, count)

    def _run(self, torch: Any, prompt: list[int], count: int) -> None:
        out = self.model(torch.tensor([prompt]), use_cache=True)
        self.logits.append(out.logits[0].float().numpy())
        tokens = [int(out.logits[0, -1].argmax())]
        for _ in range(count - 1):
            out = self.model(
                torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True
            )
            tokens.append(int(out.logits[0, -1].argmax()))
        self.tokens.append(tokens)


def compare(
    llm: LLM, prompts: list[list[int]], logits: list[Any], tokens: list[list[int]], count: int
) -> dict[str, Any]:
    """Our logits and greedy tokens against the reference's; the prompts run as one batch."""
    greedy = SamplingParams(
        temperature=0.0, repetition_penalty=1.0, max_tokens=count, ignore_eos=True
    )
    ours = [list(c.tokens) for c in llm.generate(prompts, greedy)]
    rows = []
    for prompt, wanted, theirs, mine in zip(prompts, logits, tokens, ours, strict=True):
        rows.append(_row(llm, prompt, wanted, theirs, mine))
    error = max(row["relative_error"] for row in rows)
    return {
        "model": llm.info.name,
        "reference": "transformers",
        "options": llm.options.describe(),
        "prompts": rows,
        "max_relative_error": error,
        "tolerance": TOLERANCE,
        "equal": error <= TOLERANCE and all(row["tokens_equal"] for row in rows),
    }


def _row(llm: LLM, prompt: list[int], wanted: Any, theirs: list[int], mine: list[int]) -> dict:
    import numpy as np

    computed = llm.logits(prompt)
    error = float(np.abs(computed - wanted).max())
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": len(mine),
        "max_abs_error": error,
        "relative_error": error / max(float(np.abs(wanted).max()), 1e-30),
        "tokens_equal": same is None,
        "first_difference": same,
    }


def lines(whole: dict[str, Any]) -> list[str]:
    """The comparison for people."""
    rows = [("prompt", "new", "logits: max abs error", "relative", "greedy tokens")]
    for row in whole["prompts"]:
        tokens = "equal" if row["tokens_equal"] else f"differ at {row['first_difference']}"
        rows.append(
            (
                str(row["prompt_tokens"]),
                str(row["new_tokens"]),
                f"{row['max_abs_error']:.2e}",
                f"{row['relative_error']:.2e}",
                tokens,
            )
        )
    verdict = "Equal" if whole["equal"] else "NOT equal"
    error, allowed = f"{whole['max_relative_error']:.1e}", f"{whole['tolerance']:.0e}"
    return [
        f"{whole['model']} against {whole['reference']}, float32, options {whole['options']}",
        "",
        *terminal.table(rows, right=(0, 1, 2, 3)),
        "",
        f"{verdict}: relative error {error}, allowed {allowed}; prompts ran as one batch.",
    ]
