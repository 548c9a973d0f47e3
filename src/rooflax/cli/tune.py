"""`rooflax tune`: measures kernels' block sizes on this device and keeps those that are faster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, terminal
from rooflax.cli.parser import Parser, at_least_one

if TYPE_CHECKING:
    from rooflax.bench.tuning import Finding

SUMMARY = "measure kernel block sizes for this device and keep the fastest"


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    add = parser.group("the work").add_argument
    add("--batch", metavar="N", type=at_least_one, default=1, help="rows that decode; default 1")
    add(
        "--prompt-tokens", metavar="N", type=at_least_one,
        help="of a prompt, and before the tokens that are decoded; default 1024, or the model's "
        "most",
    )  # fmt: skip
    add("--trials", metavar="N", type=at_least_one, default=10, help="timed runs; default 10")
    flags.add_precision(parser)
    flags.add_device(parser)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the table of this kind of device, and prints what was found."""
    precision, where = flags.check_precision(args), flags.find_arguments(args)
    with terminal.statuses(args.quiet) as say:
        say("starting JAX")
        platform.start_jax(args)
        from rooflax.bench import tuning
        from rooflax.engine.compilation import enable_persistent_cache
        from rooflax.loading.load import describe

        work = tuning.Work(args.batch, args.prompt_tokens, args.trials, precision)
        tuning.check_here()
        enable_persistent_cache()
        about = describe(args.model, **where)
        tuning.keep([])  # before measuring: a table that cannot be written is no use
        found = tuning.tune_model(about, work, say)
        kept = tuning.keep(found)
    if args.verbose:
        for line in _candidates(found):
            terminal.say(line)
    if args.json:
        findings = [finding.as_json() for finding in found]
        terminal.print_json({"model": about.name, "table": kept, "findings": findings})
        return 0
    for line in terminal.table(_rows(found), right=(5,)):
        print(line)
    better = sum(finding.ratio is not None for finding in found)
    print(f"{better} of {len(found)} are faster than the rule, and kept in {kept}")
    return 0


def _rows(found: list[Finding]) -> list[tuple[str, ...]]:
    rows = [("program", "kernel", "shape", "rule", "best", "times as fast")]
    for finding in found:
        ratio = finding.ratio
        rows.append(
            (
                finding.program,
                finding.question.kernel,
                _joined(finding.question.shape),
                _joined(finding.question.rule),
                "the rule" if ratio is None else _joined(finding.best),
                "" if ratio is None else f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            )
        )
    return rows


def _candidates(found: list[Finding]) -> list[str]:
    """Each candidate's median, for --verbose."""
    rows = []
    for finding in found:
        name = f"{finding.program} {finding.question.kernel} {_joined(finding.question.shape)}"
        for sizes, median in finding.seconds.items():
            rows.append((name, _joined(sizes), terminal.seconds(median)))
            name = ""
        rows += [("", _joined(sizes), "does not compile") for sizes in finding.refused]
    return terminal.table(rows, right=(2,))


def _joined(values: Any) -> str:
    return " x ".join(map(str, values))
