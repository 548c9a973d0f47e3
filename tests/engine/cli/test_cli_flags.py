"""Every flag of every verb has its effect or is rejected; none is accepted and ignored.

A command is run without and with a flag. What can be observed (the exit code, both outputs, what
the model, the trainer and the files were asked for, the environment JAX starts in) must differ; or
the flag must be rejected in the words given here.
"""

import os
import re
import sys
from types import SimpleNamespace

import pytest

from rooflax.bench import compare, html, quick, serving, worker
from rooflax.bench.figures import paired_ratio
from rooflax.bench.quick import QuickResult
from rooflax.cli import terminal, verify
from rooflax.cli.main import VERBS, parser_of
from rooflax.engine import compilation
from rooflax.llm import LLM
from rooflax.loading import hub, load, model_info, plan
from rooflax.loading.model_info import ModelInfo
from rooflax.ops import variants
from rooflax.train.loop import TrainResult
from rooflax.train.tokenizer_training import save_tokenizer, train_tokenizer
from tests.flags import replaced
from tests.marks import cases
from tests.support.bench.samples import measured

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
PROMPT = ("-p", "def f(")
NO_CHECKPOINT = "is for checkpoints"

FINDING = {
    "--revision": (["main"], NO_CHECKPOINT),
    "--offline": [],
    "--ignore-config-key": (["x"], NO_CHECKPOINT),
    "MODEL": ["preset:gpt2-tiny"],
}
SAMPLING = {
    "--max-tokens": ["2"],
    "--generation-config": ["none"],
    "--temperature": ["0.5"],
    "--top-k": ["3"],
    "--top-p": ["0.5"],
    "--min-p": ["0.5"],
    "--seed": ["7"],
    "--repetition-penalty": ["1.5"],
    "--presence-penalty": ["-1"],
    "--frequency-penalty": ["1"],
    "--logit-bias": ["5=50"],
    "--stop": ["e"],
    "--stop-token-ids": ["1,2"],
    "--ignore-eos": [],
}
LAYERS = {
    "--layers": ["unrolled"],
    "--gqa": ["repeat"],
    "--moe": ["dense"],
    "--kernels": ["reference"],
}
EXECUTION = {**LAYERS, "--no-cache": [], "--no-jit": [], "--decode-steps": ["2"]}
PRECISION = {"--dtype": ["bfloat16"], "--kv-dtype": ["bfloat16"]}
DRAFTS = {"--speculate": ["ngram"], "--num-draft-tokens": (["3"], "without --speculate")}
QUANTIZE = {"--quantize": ["int8"]}
LORA = {"--lora": (["nowhere"], "nowhere is no folder; an adapter is one with")}
DEVICE = {"--platform": (["gpu"], "the platform 'gpu' is not here"), "--threads": ["1"]}
OUTPUT = {"--json": [], "--quiet": [], "--verbose": [], "--help": []}
CHECK = {"--check": []}
LENGTH = {"--max-model-len": ["100"]}
BUDGET = {"--weights-budget": (["1GB"], "no file to read them from")}

PROCESSES = {
    "--coordinator": (["nowhere"], "it must be HOST:PORT"),
    "--num-processes": (["2"], "need --coordinator"),
    "--process-id": (["0"], "need --coordinator"),
}

COMMANDS = {
    "generate": (
        [TINY, "-n", "3"],
        FINDING | CHECK | SAMPLING | LENGTH | PRECISION | QUANTIZE | EXECUTION | DEVICE | OUTPUT
        | {"--input": (["x.json"], "belong together"), "--output": (["x.json"], "belong together"),
           "--force": ([], "is for --output")}
        | {"--prompt": ["for x in"], "--samples": ["2"], "--logprobs": ["1"],
           "--num-beams": ["2"], "--length-penalty": (["2"], "is for beams"),
           "--early-stopping": (["never"], "is for beams"),
           "--json-schema": ['{"type": "boolean"}'], "--regex": ["[ab]+"],
           "--grammar": ['start: "ab"'],
           "--mesh": ["tensor=2"]} | DRAFTS | BUDGET | PROCESSES | LORA,
    ),
    "chat": (
        [TINY, "-n", "3"],
        FINDING | CHECK | SAMPLING | LENGTH | PRECISION | QUANTIZE | EXECUTION | DEVICE | OUTPUT
        | {"--system": (["be brief"], "needs a chat template"), "--mesh": ["tensor=2"],
           "--prompt": ["for x in"], "--show-thinking": ([], "is for GPT-OSS's channels"),
           "--url": (["nowhere"], "it must be like http"), "--api-key": (["k"], "is for --url"),
           "--json": None} | DRAFTS | BUDGET | LORA,
    ),
    "train": (
        [TINY, "--steps", "1", "--batch", "2", "--seq-len", "16", "--out", "RUN",
         "--data", "DOCS", "--glob", "*.md"],
        FINDING | CHECK | DEVICE | PROCESSES | OUTPUT | {
            "--data": ["MORE"],
            "--glob": ["*.rst"],
            "--text-field": (["body"], "is for .jsonl files"),
            "--held-out-fraction": ["0.5"],
            "--out": ["ANOTHER"],
            "--config": (["x.json"], "give one of them"),
            "--tokenizer": ["TOKENIZER"],
            "--vocab-size": (["300"], "is for new weights"),
            "--steps": ["2"],
            "--tokens": (["100"], "both --steps and --tokens are given"),
            "--batch": ["4"],
            "--seq-len": ["8"],
            "--micro-batches": ["2"],
            "--learning-rate": ["0.5"],
            "--min-lr-ratio": ["0.5"],
            "--warmup-steps": ["3"],
            "--weight-decay": ["0.2"],
            "--optimizer": ["muon"],
            "--epochs": (["1"], "both --steps and --epochs are given"),
            "--mask-prompt": ([], "plain text, which has no prompt"),
            "--assistant-only-loss": ([], "plain text, which has no prompt"),
            "--truncation": (["some"], "truncation is 'some'"),
            "--dry-run": [],
            "--sample": (["x", "--layers", "scan"], "does not go with --layers scan"),
            "--report-to": (["x"], "invalid choice: 'x'"),
            "--patience": ["2"],
            "--save-best": [],
            "--save-dtype": ["float16"],
            "--clip-norm": ["2"],
            "--beta1": ["0.5"],
            "--beta2": ["0.5"],
            "--seed": ["3"],
            "--dtype": ["bfloat16"],
            "--remat": ["dots"],
            "--layers": ["scan"],
            "--mesh": ["data=2"],
            "--eval-every": ["1"],
            "--eval-batches": ["2"],
            "--checkpoint-every": ["5"],
            "--keep": ["5"],
            "--fine-tune-type": ["lora"],
            "--train-mode": (["dpo"], "--glob is for --train-mode sft"),
        } | {
            flag: (value, "is of preferences")
            for flag, value in {
                "--beta": ["0.2"], "--loss-type": ["ipo"], "--label-smoothing": ["0.1"],
            }.items()
        } | {
            flag: (value, "is of rewards")
            for flag, value in {
                "--reward": ["x.py:f"], "--num-generations": ["4"], "--epsilon": ["0.1"],
                "--max-completion-length": ["9"], "--num-iterations": ["2"],
            }.items()
        } | {
            flag: (value, "is of an adapter")
            for flag, value in {
                "--lora-rank": ["4"], "--lora-alpha": ["4"], "--lora-dropout": ["0.5"],
                "--use-rslora": [], "--target-modules": ["q_proj"], "--num-layers": ["1"],
                "--modules-to-save": ["lm_head"],
                "--target-parameters": ["mlp.experts.down_proj"],
            }.items()
        },
    ),
    "bench": (
        [TINY],
        FINDING | EXECUTION | PRECISION | QUANTIZE | DEVICE | OUTPUT
        | {
            "--lora": ["nowhere"],  # opened in the row's own process
            "--platform": ["gpu"],  # rejected in the row's own process
            "--batch": ["2,3"],
            "--mesh": ["data=2"],
            "--prompt-tokens": ["8"],
            "--output-tokens": ["9"],
            "--trials": ["2"],
            "--deterministic": [],
            "--ablate": [],
            "--versus": [" --no-cache"],
            "--compare": (["x.json", "x.json"], "MODEL has no meaning with --compare"),
            "--breakdown": [],
            "--profile": ["TRACE"],
            "--quick": ([], "MODEL has no meaning with --quick"),
            "--concurrent": [],
            "--request-rate": ["3"],
            "--requests": (["3"], "a meaning only with"),
            "--target-ttft": (["3"], "a meaning only with"),
            "--target-tpot": (["3"], "a meaning only with"),
            "--markdown": [],
            "--report": [],
            "--html": ["page.html"],
        },
    ),
    "inspect": (
        [TINY],
        FINDING | LENGTH | PRECISION | QUANTIZE | BUDGET | DEVICE
        | {"--batch": ["3"], "--mesh": ["tensor=2"], "--json": [], "--help": []},
    ),
    "verify": (
        ["-n", "2"],
        FINDING | CHECK | EXECUTION | DEVICE | OUTPUT
        | {"MODEL": ([TINY], "has no files"), "--prompt": ["x = 1"], "--max-tokens": ["3"],
           "--mesh": ["tensor=2"], "--weights-budget": ["1GB"]},
    ),
    "perplexity": (
        [TINY],
        FINDING | CHECK | LENGTH | QUANTIZE | BUDGET | LAYERS | DEVICE | OUTPUT
        | {"--dtype": ["bfloat16"], "--file": ["TEXT"], "--stride": ["3"],
           "--max-model-len": ["12"], "--mesh": ["tensor=2"]} | PROCESSES,
    ),
    "eval": (
        [TINY, "--data", "TEXT"],
        FINDING | CHECK | QUANTIZE | BUDGET | LAYERS | DEVICE | OUTPUT | LORA
        | {"--dtype": ["bfloat16"], "--data": ["DOCS/0.md"], "--max-model-len": ["12"],
           "--mask-prompt": ([], "plain text has no prompt"),
           "--assistant-only-loss": ([], "plain text has no prompt"), "--mesh": ["tensor=2"]},
    ),
    "quantize": (
        [TINY, "-q", "int4", "-o", "OUT"],
        FINDING | CHECK | QUANTIZE | DEVICE | OUTPUT
        | {"--dtype": ["bfloat16"], "--output": ["OTHER"], "--force": None,
           "--gguf": (["Q8_0"], "given beside --gguf"), "--calibrate": (["no.txt"], "no.txt")},
    ),
    "models": ([], {"--remove": ["owner/name"], "--json": [], "--help": []}),
    "doctor": ([], DEVICE | {"--time-kernels": [], "--json": [], "--help": []}),
    "tokenize": (
        [TINY, "-p", "def f(x):"],
        FINDING | {"--prompt": ["import"], "--no-special-tokens": None, "--json": [], "--help": []},
    ),
    "detokenize": (
        [TINY, "--tokens", "0 5 6"],
        FINDING | {"--tokens": ["7"], "--skip-special-tokens": [], "--help": []},
    ),
    "completion": (["bash"], {"SHELL": None, "--help": []}),
}  # fmt: skip
del COMMANDS["chat"][1]["--json"]


GAIN = serving.BatchingGain(512, 1.0, 5.0, 5.0, 6.0, 1.0)
SERVED = {
    "model": "m", "mix": "fixed", "loop": "open", "errors": {}, "requests_per_s": 3.0,
    "requests": 3, "request_rate": 3.0, "prompt_tokens": 4, "output_tokens": 5,
    "output_tok_per_s": 6.0, "goodput_per_s": 1.0, "good_requests": 3,
    "target_ttft_s": 1.0, "target_tpot_s": 0.1,
}  # fmt: skip
SERVED |= {
    name: dict.fromkeys(("p50", "p90", "p99", "mean"), 1.0)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
}


RUN = ("quantize", "max_model_len", "weights_budget", "lora")
FIND = ("revision", "offline", "ignore_config_keys")


def flags_of(verb):
    for action in parser_of(verb)._actions:
        longs = [name for name in action.option_strings if name.startswith("--")]
        yield longs[0] if longs else action.metavar


def test_the_tables_name_every_flag_of_every_verb():
    # tests/unit/server/test_flags.py and test_cli_embed.py hold those to the same; fuse's are tried
    # in test_adapters.py
    others = {"serve", "bench serve", "batch", "embed", "rerank", "fuse"}
    assert set(COMMANDS) == set(VERBS) - others
    for verb in COMMANDS:
        assert set(flags_of(verb)) == set(COMMANDS[verb][1]), verb


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """What the parts below the command line were asked for."""
    asked = []

    class Spy(LLM):
        def __init__(self, plan, **kwargs):
            kwargs.pop("progress")
            asked.append(("LLM", plan.info.name, kwargs))
            super().__init__(plan)

        def stream(self, prompts, params=None):
            asked.append(("stream", prompts, params))
            return super().stream(prompts, params)

    def find(model, **kwargs):
        asked.append(("model_info", model, kwargs))
        return load_info(model, **kwargs)

    def plan_for(model, **kwargs):
        asked.append(("make_plan", {k: str(v) for k, v in kwargs.items()}))
        runs = set(kwargs) if isinstance(model, ModelInfo) else {*RUN, *FIND}
        return make_plan(model, **{name: kwargs[name] for name in runs & set(kwargs)})

    def train(model, config, training, held_out, folder, *, progress=None, **_):
        numbers = (len(training.tokens), None if held_out is None else len(held_out.tokens))
        asked.append(("train", config, numbers, folder, model.config, progress))
        return TrainResult(model, 0, 0, 1.0, None, None, interrupted=False, was_complete=False)

    def load_model(info, **kwargs):
        asked.append(("load", kwargs))
        return load_load(info, **kwargs)

    load_info, make_plan, load_load = model_info.model_info, plan.make_plan, load.load
    monkeypatch.setattr("rooflax.llm.LLM", Spy)
    monkeypatch.setattr(model_info, "model_info", find)
    monkeypatch.setattr(plan, "make_plan", plan_for)
    monkeypatch.setattr(load, "load", load_model)
    monkeypatch.setattr("rooflax.train.loop.run_training", train)
    monkeypatch.setattr("rooflax.train.loop.write_curves", lambda folder: [])
    report = {
        "model": "m", "reference": "r", "options": "o", "prompts": [], "max_relative_error": 0.0,
        "tolerance": 0.0, "equal": True,
    }  # fmt: skip
    nothing = SimpleNamespace(logits=[], tokens=[])
    monkeypatch.setattr(verify, "_import_transformers", lambda: None)
    monkeypatch.setattr(verify, "_Reference", lambda *_: nothing)
    monkeypatch.setattr(verify, "compare", lambda _, *given: asked.append(given) or report)
    replace_measuring(monkeypatch, asked)
    monkeypatch.setattr(hub, "remove", lambda name: asked.append(("remove", name)) or 1)
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(variants, "measure_again", lambda: asked.append("timed") or {})
    return asked


def replace_measuring(monkeypatch, asked):
    """Workloads are written down instead of measured."""

    def measure(work, job="measure", **arguments):
        asked.append((work, job, arguments))
        return measured(work, job)

    def versus(a, b, label):
        asked.append((a, b, label))
        ratio = paired_ratio([1.0] * 5, [2.0] * 5)
        return compare.Comparison(label, ratio, ratio, True)

    monkeypatch.setattr(worker, "measure_apart", measure)
    monkeypatch.setattr(compare, "versus", versus)
    monkeypatch.setattr(quick, "quick", lambda: QuickResult(1.0, 4.0, True))
    monkeypatch.setattr(serving, "batching_gain", lambda work: asked.append(work) or GAIN)
    monkeypatch.setattr(serving, "under_rate", lambda *given: asked.append(given) or SERVED)
    monkeypatch.setattr(html, "write_page", lambda path, document: path.write_text("page"))


@pytest.fixture
def observe(rooflax, seen, tmp_path, monkeypatch):
    """Runs one command in a fresh folder and returns all that can be seen of it."""
    runs = iter(range(1000))

    def run(verb, *argv):
        folder = tmp_path / str(next(runs))
        folder.mkdir()
        _write_files(folder)
        monkeypatch.chdir(folder)
        seen.clear()
        before = dict(os.environ)
        if "--prompt" not in argv and verb == "generate":
            argv = (*argv, *PROMPT)
        text = b"import os\nimport sys\n\ndef main():\n    return os.sep\n"
        ran = rooflax(verb, *argv, stdin=b"hello\n" if verb == "chat" else text)
        changed = {k: v for k, v in os.environ.items() if k in ("JAX_PLATFORMS", "PJRT_NPROC")}
        os.environ.clear()
        os.environ.update(before)
        made = sorted(path.name for path in folder.iterdir())
        err = re.sub(r"[\d.,]+ (ms|s|tok/s|MiB|GiB|compilations?)\b", "#", ran.err)
        return SimpleNamespace(
            code=ran.code, out=_steady(ran.out), err=err, asked=repr(seen), env=changed, made=made
        )

    return run


def _steady(out):
    """The output without what no two runs have in common."""
    keys = r'"(\w+_s|\w+_per_s|compilations|peak_rss_bytes|free_bytes|available_bytes)": [^,\n]+'
    out = re.sub(r"\nspeed to expect.*?\n\n", "\n", re.sub(keys, "", out), flags=re.DOTALL)
    return re.sub(r"(free now|memory) +[\d.]+ GiB.*", "", out)


def _write_files(folder):
    (folder / "DOCS").mkdir()
    (folder / "MORE").mkdir()
    for number in range(8):
        (folder / f"DOCS/{number}.md").write_text("A short text about nothing.\n" * 8)
        (folder / f"DOCS/{number}.rst").write_text("Another text, somewhat longer.\n" * 9)
        (folder / f"MORE/{number}.md").write_text("More of it.\n" * 30)
    (folder / "TEXT").write_text("for x in range(3):\n    print(x)\n")
    save_tokenizer(train_tokenizer(["for x in y"], 300), folder / "TOKENIZER", model_max_length=9)
    (folder / "x.json").write_text("{}")


@pytest.mark.parametrize(
    "verb", cases(COMMANDS, nightly=["generate"], every_jax=["doctor", "inspect"])
)
def test_every_flag_has_its_effect_or_is_rejected(observe, verb):
    base, table = COMMANDS[verb]
    if verb == "doctor":
        observe(verb, *base)  # puts its tiny program into an empty compile cache
    plain, again = observe(verb, *base), observe(verb, *base)
    assert plain.code == 0, plain.err
    assert vars(plain) == vars(again), "two equal commands look different"
    for flag, wanted in table.items():
        if wanted is None:
            continue
        values, rejection = wanted if isinstance(wanted, tuple) else (wanted, None)
        argv = [*values, *_without_model(base)]
        if flag != "MODEL":
            argv = replaced(verb, base, [flag, *values])
        ran, other = observe(verb, *argv), plain
        if flag == "--quiet":  # what it hides is shown to people only
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stderr)
                ran, other = observe(verb, *argv), observe(verb, *base)
        if rejection is not None:
            assert (ran.code, ran.out) == (2, ""), (flag, ran)
            assert rejection in ran.err, (flag, ran.err)
        else:
            assert ran.code == 0, (flag, ran.err)
            assert vars(ran) != vars(other), f"{verb} {flag} {values} changes nothing"


def _without_model(base):
    return base[1:] if base and base[0] == TINY else base


@pytest.mark.every_jax
def test_short_and_other_names_mean_the_same():
    parse = parser_of("generate").parse_args
    pairs = [
        (["-p", "x"], ["--prompt", "x"]),
        (["-n", "3"], ["--max-tokens", "3"]),
        (["--max-new-tokens", "3"], ["--max-tokens", "3"]),
        (["--n-predict", "3"], ["--max-tokens", "3"]),
        (["-s", "3"], ["--seed", "3"]),
        (["--temp", "0"], ["--temperature", "0"]),
        (["-c", "64"], ["--max-model-len", "64"]),
        (["--ctx-size", "64"], ["--max-model-len", "64"]),
        (["-q", "int8"], ["--quantize", "int8"]),
        (["-t", "2"], ["--threads", "2"]),
    ]
    for short, long in pairs:
        assert parse(short) == parse(long) != parse([])
    assert parse(["-n", "3", TINY]) == parse([TINY, "-n", "3"])


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--prompt-tokens 9", "both sides do the same work"),
        ("--batch 1", "both sides do the same work"),
        ("--trials 9", "both sides do the same work"),
        ("--json", "both sides do the same work"),
        ("--markdown", "both sides do the same work"),
        ("--verbose", "both sides do the same work"),
        ("--help", "both sides do the same work"),
        ("--request-rate 2", "cannot hold --request-rate: both sides do the same work"),
        ("--threads 2", "both sides run in one process"),
        ("--deterministic", "both sides run in one process"),
    ],
)
def test_versus_is_about_settings_and_not_about_the_work(rooflax, flags, reason):
    ran = rooflax("bench", TINY, f"--versus= {flags}")
    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err


BENCH_JOBS = {
    "quick": (["--quick"], {"platform", "threads"}),
    "compare": (["--compare", "x.json", "x.json"], set()),
    "versus": (["--versus= --no-cache"], {"batch", "prompt_tokens", "output_tokens", "trials"}),
    "ablate": (["--ablate"], {"batch", "trials", "markdown", "html"}),
    "breakdown": (["--breakdown"], {"batch", "output_tokens", "profile"}),
    "profile": (["--profile", "TRACE"], {"batch", "output_tokens", "breakdown"}),
    "concurrent": (["--concurrent"], {"prompt_tokens", "output_tokens", "trials"}),
    "request_rate": (["--request-rate", "9"], {"prompt_tokens", "requests", "target_ttft"}),
}
"""Per job how it is asked for, and some flags that it honours."""
ANY_JOB = {"json", "quiet", "verbose"}
ONE_ROW = {"model", "layers", "gqa", "moe", "no_cache", "no_jit", "dtype", "threads", "quantize"}


@pytest.mark.parametrize("job", cases(BENCH_JOBS, every_jax=["versus"]))
def test_each_job_of_bench_rejects_the_flags_that_it_does_not_read(observe, job):
    argv, honoured = BENCH_JOBS[job]
    if job not in ("quick", "compare"):
        honoured = honoured | ONE_ROW
    if job in ("concurrent", "request_rate"):  # a fully warm engine has neither
        honoured = honoured - {"no_cache", "no_jit"}
    values = {
        name.strip("-").replace("-", "_").lower(): v for name, v in COMMANDS["bench"][1].items()
    }
    plain = observe("bench", *argv)
    assert plain.code == 0 or "has no results" in plain.err, plain
    assert vars(plain) != vars(observe("bench")), "the job is ignored"
    rejected = set()
    for name, wanted in values.items():
        given = wanted[0] if isinstance(wanted, tuple) else wanted
        if name in (job, "help"):
            continue
        flag = [] if name == "model" else ["--" + name.replace("_", "-")]
        ran = observe("bench", *replaced("bench", argv, [*flag, *given]))
        if name in honoured | ANY_JOB:
            assert "no meaning" not in ran.err, (name, ran.err)
        elif "drop one of them" in ran.err or "different jobs" in ran.err:
            assert (ran.code, ran.out) == (2, ""), name
            assert "_" not in ran.err, ran.err
            rejected.add(name)
    must = {"deterministic", "report", "html", "markdown", "no_cache", "batch", *BENCH_JOBS}
    assert must - {job, *honoured} <= rejected


def test_a_flag_with_the_value_of_its_default_is_rejected_too(rooflax):
    ran = rooflax("bench", "--quick", "--prompt-tokens", "64")
    assert (ran.code, ran.out) == (2, "")
    assert "--prompt-tokens has no meaning with --quick" in ran.err
    assert "MODEL has no meaning with --quick" in rooflax("bench", TINY, "--quick").err


@pytest.mark.parametrize(
    "flags",
    [
        ("-p", "a", "-p", "b"),
        ("-p", "a", "--seed", "1", "-s", "2"),
        ("-p", "a", "--temp", "0", "--temperature", "0"),
    ],
)
def test_a_flag_of_one_value_is_given_once(rooflax, flags):
    ran = rooflax("generate", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert f"{flags[-2]} is given twice, and takes one value; give it once" in ran.err
