"""`rooflax bench`: how fast a model is here, and how far that is from what the machine allows."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, terminal
from rooflax.cli.parser import Parser, at_least_one, number
from rooflax.errors import RequestError
from rooflax.files import only_writer
from rooflax.nn.shards import parse_mesh

if TYPE_CHECKING:
    from rooflax.bench.workload import Workload

DONE, FAILED = 0, 1
MODES = ("quick", "versus", "compare", "ablate", "breakdown", "request_rate", "concurrent")
LISTS = ("layers", "gqa", "moe", "kernels", "decode_steps", "dtype", "kv_dtype", "quantize")
OF_RATE = {
    "requests": "num_requests",
    "target_ttft": "target_ttft_s",
    "target_tpot": "target_tpot_s",
}
"""Flags that mean something only with --request-rate, and what `ServerLoad` calls them."""
MODEL = ("model", "revision", "offline", "ignore_config_keys", "lora")
SETTINGS = (*LISTS, "no_cache", "no_jit")
DEVICE = ("platform", "threads")
LENGTHS = ("prompt_tokens", "output_tokens")
ONE_SERVED = (*MODEL, *LISTS, *DEVICE, *LENGTHS)
ONE_ROW = (*ONE_SERVED, "no_cache", "no_jit", "mesh")
ALWAYS = ("json", "quiet", "verbose", "help")
MEANT = {
    "": (*ONE_ROW, "batch", "trials", "deterministic", "markdown", "report", "html"),
    "ablate": (*ONE_ROW, "batch", "trials", "markdown", "html"),
    "versus": (*ONE_ROW, "batch", "trials"),
    "compare": (),
    "breakdown": (*ONE_ROW, "batch", "profile"),
    "quick": DEVICE,
    "concurrent": (*ONE_SERVED, "trials"),
    "request_rate": (*ONE_SERVED, *OF_RATE),
}
"""Per job, the flags that mean something with it, besides its own and `ALWAYS`."""
NEW_PROCESS = (*DEVICE, "deterministic")
"""Flags that --versus cannot change: both sides run in one process."""


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_lora(parser)
    add = parser.group("the work; N,N or HOW,HOW measures every combination").add_argument
    add("--batch", metavar="N", type=_counts, default=[1], help="prompts at once; default 1")
    add("--prompt-tokens", metavar="N", type=_counts, default=[64], help="default 64")
    add("--output-tokens", metavar="N", type=_counts, default=[64], help="default 64")
    add("--trials", metavar="N", type=at_least_one, default=5, help="timed runs; default 5")
    add("--deterministic", action="store_true", help="deterministic operations, and what they cost")
    add = parser.group("instead of a row per combination").add_argument
    add(
        "--ablate",
        action="store_true",
        help="add options one at a time, from the slowest setting up",
    )
    add("--versus", metavar="FLAGS", help='compare with these flags: --versus="--no-cache"')
    add("--compare", metavar="FILE", nargs=2, help="two documents of --json")
    add("--breakdown", action="store_true", help="time shares of attention, matmuls, norms ...")
    add("--profile", metavar="DIR", help="write a trace of one run for xprof or Perfetto")
    add("--quick", action="store_true", help="compare with and without a KV cache; exit 1 below 3x")
    add(
        "--concurrent",
        action="store_true",
        help="gain from batching 16 requests; exit 1 below target",
    )
    add("--request-rate", metavar="R", type=number, help="arrival rate: R requests per second")
    add("--requests", metavar="N", type=at_least_one, help="number of requests; default 64")
    add("--target-ttft", metavar="S", type=number, help="seconds, for goodput; default 1")
    add("--target-tpot", metavar="S", type=number, help="seconds a token; default 0.1")
    flags.add_precision(parser, lists=True)
    flags.add_execution(parser, lists=True)
    flags.add_device(parser, mesh=True)
    add = parser.group("output").add_argument
    add("--markdown", action="store_true", help="the table as Markdown")
    add("--report", action="store_true", help="full report of each row, as text")
    add("--html", metavar="FILE", help="also write an HTML page with plots")
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    mode = _mode(args)
    if args.mesh is not None:
        parse_mesh(args.mesh)
    if args.html:
        from rooflax.bench.html import check_page

        check_page(Path(args.html))
    if mode == "compare":
        return _compare(args)
    if mode in ("quick", "versus", "request_rate", "concurrent"):
        platform.start_jax(args)
    else:
        platform.settle(args)  # rows run in processes of their own; none of them shares a device
    verbs = {
        "quick": _quick,
        "versus": _versus,
        "ablate": _ablate,
        "breakdown": _breakdown,
        "request_rate": _request_rate,
        "concurrent": _concurrent,
    }
    with contextlib.ExitStack() as held:
        for path in filter(None, (args.html, args.profile)):
            held.enter_context(only_writer(path))
        return verbs.get(mode, _rows)(args)


def _mode(args: argparse.Namespace) -> str:
    """Mode that replaces rows ("" for rows).

    Raises:
        RequestError: flags that contradict each other.
    """
    if args.profile is not None:
        args.breakdown = True
    modes = [name for name in MODES if getattr(args, name) not in (None, False)]
    if len(modes) > 1:
        one, other = map(_flag, modes[:2])
        raise RequestError(f"{one} and {other} are different jobs; give one of them")
    mode = modes[0] if modes else ""
    for name in OF_RATE:
        if name in args.stated and mode != "request_rate":
            flag = _flag(name)
            raise RequestError(f"{flag} has a meaning only with --request-rate; give that too")
    job = _flag("profile" if args.profile is not None else mode)
    for name in args.stated:
        if name not in (mode, *MEANT[mode], *ALWAYS):
            raise RequestError(f"{_flag(name)} has no meaning with {job}; drop one of them")
    shown = [name for name in ("json", "markdown", "report") if getattr(args, name)]
    if len(shown) > 1:
        raise RequestError(f"--{shown[0]} and --{shown[1]} both say what to print; give one")
    return mode


def _flag(name: str) -> str:
    """A setting as it is written on the command line."""
    from rooflax.cli.main import parser_of

    return parser_of("bench").flag_of(name)


def _rows(args: argparse.Namespace) -> int:
    """Each combination in its own process, then one table or document."""
    from rooflax.bench.document import document

    works = _workloads(args)
    document_ = document(_measured(works, args.quiet))
    if args.verbose:
        for key, value in document_["environment"].items():
            terminal.say(f"{key}: {value}")
    _write_html(args, document_)
    _print_rows(args, document_)
    return DONE


def _measured(works: list[Workload], quiet: bool) -> list[dict[str, Any]]:
    """Each row measured apart; a deterministic one twice, for what that costs."""
    from rooflax.bench.document import with_cost
    from rooflax.bench.worker import measure_apart

    rows = []
    for index, work in enumerate(works, start=1):
        label = (
            f"row {index} of {len(works)}: batch {work.batch}, "
            f"{work.prompt_tokens} + {work.output_tokens} tokens, {work.options.describe()}"
        )
        with terminal.status(label[:76], quiet):
            row = measure_apart(work)
            if work.deterministic:
                row = with_cost(row, measure_apart(replace(work, deterministic=False)))
        rows.append(row)
    return rows


def _print_rows(args: argparse.Namespace, document: dict[str, Any]) -> None:
    from rooflax.bench import report
    from rooflax.bench.figures import MIN_PAIRS

    if args.json:
        terminal.print_json(document)
        if args.trials < MIN_PAIRS and not args.quiet:
            terminal.say(f"--compare needs {MIN_PAIRS} trials or more, and these are {args.trials}")
    elif args.report:
        print(report.full_report(document))
    elif args.markdown:
        print(report.markdown(document["results"]))
    else:
        print(report.table(document["results"]))
        if not args.quiet:
            for line in report.notes(document):
                terminal.say(line)


def _ablate(args: argparse.Namespace) -> int:
    from rooflax.bench import report
    from rooflax.bench.ablate import ablation, comparable, summarise
    from rooflax.bench.document import document
    from rooflax.bench.worker import measure_apart
    from rooflax.loading.plan import make_plan

    work = _one(args, "--ablate")
    plan = make_plan(work.model, **vars(work.precision), **work.source)
    work = comparable(work, plan.precision)
    rows = ablation(work, plan.info.config, measure_apart(work, "kernels")["result"])
    if not args.quiet:
        terminal.say(
            f"{len(rows)} rows, each in a process of its own, the slowest first; the rows without "
            f"a cache or jit can take minutes (fewer --output-tokens are faster)"
        )
    measured = _measured([row.work for row in rows], args.quiet)
    whole = document(measured) | {"ablation": summarise(rows, [m["result"] for m in measured])}
    _write_html(args, whole)
    if args.json:
        terminal.print_json(whole)
    else:
        draw = report.ablation_markdown if args.markdown else report.ablation_table
        print(draw(whole["ablation"]))
    same = all(row["same_tokens"] for row in whole["ablation"] if row["exact"])
    if not same:
        terminal.say("rooflax: an option changed the tokens, which none may do")
    return DONE if same else FAILED


def _breakdown(args: argparse.Namespace) -> int:
    from rooflax.bench import report
    from rooflax.bench.worker import measure_apart

    work = _one(args, "--profile" if args.profile else "--breakdown")
    folder = None if args.profile is None else str(Path(args.profile).absolute())
    with terminal.status("profiling", args.quiet):
        document = measure_apart(work, "breakdown", folder=folder)
    if args.json:
        terminal.print_json({"environment": document["environment"], **document["result"]})
    else:
        print(report.breakdown_table(document["result"]))
        if folder and not args.quiet:
            terminal.say(f"trace: {folder}")
    return DONE


def _quick(args: argparse.Namespace) -> int:
    from rooflax.bench.quick import LEAST_RATIO, quick

    with terminal.status("old method against new", args.quiet):
        speeds = quick()
    if args.json:
        terminal.print_json(vars(speeds) | {"ratio": speeds.ratio, "passed": speeds.passed})
    else:
        same = "the same tokens" if speeds.same_tokens else "DIFFERENT tokens"
        print(
            f"without cache {speeds.old_tok_per_s:.0f} tok/s, with cache "
            f"{speeds.new_tok_per_s:.0f} tok/s: {speeds.ratio:.1f}x (at least "
            f"{LEAST_RATIO:.0f}x), {same}"
        )
    return DONE if speeds.passed else FAILED


def _request_rate(args: argparse.Namespace) -> int:
    from rooflax.bench.load import ServerLoad, load_table
    from rooflax.bench.serving import under_rate

    work = _one(args, "--request-rate")
    lengths = {name: getattr(work, name) for name in LENGTHS}
    options = {"per_s": args.request_rate, **{n: getattr(args, k) for k, n in OF_RATE.items()}}
    load = ServerLoad(
        **lengths, **{name: value for name, value in options.items() if value is not None}
    )
    with terminal.status(f"{load.num_requests} requests", args.quiet):
        result = under_rate(work, load)
    if args.json:
        terminal.print_json(result)
    else:
        print(load_table(result))
    return DONE


def _concurrent(args: argparse.Namespace) -> int:
    from rooflax.bench.serving import batching_gain, gain_lines

    work = _one(args, "--concurrent")
    with terminal.status("alone and together", args.quiet):
        gain = batching_gain(work)
    if args.json:
        names = ("speedup", "share", "ttft_ratio")
        ratios = {name: getattr(gain, name) for name in names}
        terminal.print_json(vars(gain) | ratios | {"passed": gain.passed})
    else:
        print(gain_lines(gain))
    return DONE if gain.passed else FAILED


def _versus(args: argparse.Namespace) -> int:
    from rooflax.bench.compare import versus

    work = _one(args, "--versus")
    other = _one(_other_args(args), "--versus")
    with terminal.status("interleaved trials", args.quiet):
        comparison = versus(work, other, f"{args.versus} against without")
    if args.json:
        terminal.print_json(comparison.as_json())
    else:
        print("\n".join(comparison.lines()))
    return DONE


def _other_args(args: argparse.Namespace) -> argparse.Namespace:
    """The same command with the flags of --versus on top.

    Raises:
        RequestError: a flag that needs a process of its own, or one that is not known.
    """
    from rooflax.cli.main import parser_of

    namespace = argparse.Namespace(**vars(args))
    try:
        words = shlex.split(args.versus)
    except ValueError as error:
        raise RequestError(f"--versus is {args.versus!r}: {error}") from None
    other = parser_of("bench").parse_args(words, namespace=namespace)
    other.model = other.model or args.model
    for name in other.stated:
        if name in NEW_PROCESS:
            raise RequestError(f"--versus cannot hold {_flag(name)}: both sides run in one process")
        if name not in (*MODEL, *SETTINGS):
            raise RequestError(f"--versus cannot hold {_flag(name)}: both sides do the same work")
    return other


def _compare(args: argparse.Namespace) -> int:
    from rooflax.bench.compare import compare_documents
    from rooflax.bench.document import read_document

    a, b = (read_document(Path(name)) for name in args.compare)
    comparisons = compare_documents(a, b)
    if args.json:
        terminal.print_json({"comparisons": [c.as_json() for c in comparisons]})
        return DONE
    for comparison in comparisons:
        print("\n".join(comparison.lines()))
    if not args.quiet:
        terminal.say("note: not measured interleaved; the machine may have changed in between")
    return DONE


def _one(args: argparse.Namespace, flag: str) -> Workload:
    """The only combination; RequestError if there are several."""
    works = _workloads(args)
    if len(works) != 1:
        raise RequestError(f"{flag} is about one row; {len(works)} combinations were given")
    return works[0]


def _workloads(args: argparse.Namespace) -> list[Workload]:
    from rooflax.bench.workload import Workload, combinations

    base = Workload(
        args.model,
        trials=args.trials,
        source=flags.find_arguments(args),
        deterministic=args.deterministic,
        platform=args.platform,
        mesh=args.mesh,
        lora=args.lora,
    )
    singles = [
        argparse.Namespace(**vars(args) | dict(zip(LISTS, values, strict=True)))
        for values in itertools.product(*(getattr(args, name) for name in LISTS))
    ]
    return combinations(
        base,
        batches=args.batch,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        settings=[(flags.execution_options(s), flags.check_precision(s)) for s in singles],
    )


def _counts(text: str) -> list[int]:
    return [at_least_one(part.strip()) for part in text.split(",")]


def _write_html(args: argparse.Namespace, document: dict[str, Any]) -> None:
    if args.html:
        from rooflax.bench.html import write_page

        write_page(Path(args.html), document)
