"""Which option, layer and token is wrong, without any other library.

From the slowest, most readable setting one option after the other is turned on. After each, the
same tokens are run (teacher-forced: no error can choose other tokens) and the greedy tokens are
generated. Where they first differ, the model is cut after fewer and fewer layers to find the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooflax.errors import RequestError
from rooflax.nn.execution import ExecutionOptions

if TYPE_CHECKING:
    import numpy as np

    from rooflax.models.model import Model
    from rooflax.nn.decoder import Decoder

TOLERANCE = 1e-4
REFERENCE = ExecutionOptions(
    use_cache=False,
    jit=False,
    layers="unrolled",
    gqa="repeat",
    moe="dense",
    kernels="reference",
    decode_steps=1,
)
ORDER = ("jit", "kernels", "gqa", "moe", "layers", "use_cache", "decode_steps")


@dataclass(frozen=True)
class Setting:
    """A stage on the way: the option that was turned on last, and all that are on."""

    name: str
    options: ExecutionOptions


@dataclass(frozen=True)
class Task:
    """Prompts with what follows them, as padded rows.

    Attributes:
        ids: [rows, seq] int32; after the prompt come the reference's greedy tokens.
        prompt_lens: [rows] tokens of each prompt.
        count: greedy tokens per row.
    """

    ids: np.ndarray
    prompt_lens: np.ndarray
    count: int

    @property
    def lengths(self) -> np.ndarray:
        return self.prompt_lens + self.count

    @property
    def greedy(self) -> list[list[int]]:
        """The reference's tokens after each prompt."""
        return [
            self.ids[row, n : n + self.count].tolist() for row, n in enumerate(self.prompt_lens)
        ]


@dataclass(frozen=True)
class Measured:
    """Logits of some positions: [rows, seq, vocab], and [rows, seq] bool that says of which."""

    logits: np.ndarray
    known: np.ndarray


def settings(target: ExecutionOptions, config: Decoder) -> list[Setting]:
    """From the reference to `target`, one option at a time; those without effect are left out."""
    options, found = REFERENCE, [Setting("reference", REFERENCE)]
    for name in ORDER:
        value = getattr(target, name)
        if value == getattr(options, name) or not _matters(name, config):
            continue
        options = replace(options, **{name: value})
        found.append(Setting(f"{name}={'default' if value is None else value}", options))
    return found


def _matters(name: str, config: Decoder) -> bool:
    if name == "gqa":
        return config.num_kv_heads != config.num_heads
    if name == "moe":
        return config.moe is not None
    return True


def isolate(model: Model, target: ExecutionOptions, task: Task) -> dict[str, Any]:
    """Turns on one option after the other, and locates the first difference.

    Args:
        model: float32, layers not stacked.
        task: from `reference_task`.
    """
    stages = settings(target, model.config)
    wanted = measure(model, REFERENCE, task)
    rows: list[dict[str, Any]] = []
    fault = None
    for index, stage in enumerate(stages):
        row = _compare(model, stage, task, wanted)
        rows.append(row)
        if not row["equal"] and fault is None:
            before = stages[max(index - 1, 0)].options
            fault = {"option": stage.name, **locate(model, before, stage.options, task, row)}
    return {
        "settings": rows,
        "tolerance": TOLERANCE,
        "equal": fault is None,
        "first_difference": fault,
    }


def reference_task(model: Model, prompts: list[list[int]], count: int) -> Task:
    """The reference's greedy tokens after each prompt, all by one padded forward per token."""
    import numpy as np

    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), int(lengths.max()) + count), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for step in range(count):
        logits = _dense(model, REFERENCE, ids, lengths + step)
        ids[rows, lengths + step] = logits[rows, lengths + step - 1].argmax(axis=-1)
    return Task(ids, lengths, count)


def dense_logits(model: Model, options: ExecutionOptions, ids: list[int]) -> np.ndarray:
    """[seq, vocab] float32 logits of one whole sequence, without a cache."""
    import numpy as np

    return _dense(model, options, np.array([ids], np.int32), np.array([len(ids)]))[0]


def measure(model: Model, options: ExecutionOptions, task: Task) -> Measured:
    """Logits of the task's tokens under a setting.

    Without a cache of every position; with one, prompts are prefilled and the rest decoded, so
    of each prompt's last position and those after it.
    """
    import numpy as np

    model = model.stacked() if options.layers == "scan" else model
    if options.use_cache:
        return _cached(model, options, task)
    known = np.arange(task.ids.shape[1])[None, :] < task.lengths[:, None]
    return Measured(_dense(model, options, task.ids, task.lengths), known)


def _dense(
    model: Model, options: ExecutionOptions, ids: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    import jax
    import numpy as np

    from rooflax.nn.batch import Batch

    def forward(model: Model, ids: Any, lengths: Any) -> Any:
        hidden, _ = model.forward(Batch.dense(ids, lengths=lengths), None, options=options)
        return model.logits(hidden, options=options)

    run = jax.jit(forward) if options.jit else forward
    ids_, lengths_ = jax.device_put((np.asarray(ids, np.int32), np.asarray(lengths, np.int32)))
    return np.asarray(run(model, ids_, lengths_))


def _cached(model: Model, options: ExecutionOptions, task: Task) -> Measured:
    import jax
    import numpy as np

    from rooflax.models.steps import decode_step, new_cache, prefill

    def first(model: Model, cache: Any, ids: Any, lengths: Any) -> Any:
        return prefill(model, cache, ids, lengths, options=options)

    def following(model: Model, cache: Any, ids: Any, positions: Any) -> Any:
        return decode_step(model, cache, ids, positions, options=options)

    if options.jit:
        first, following = jax.jit(first, donate_argnums=1), jax.jit(following, donate_argnums=1)
    rows, seq = np.arange(task.ids.shape[0]), task.ids.shape[1]
    cache = new_cache(model, len(rows), seq, options=options)
    lens = task.prompt_lens.astype(np.int32)
    prompts = jax.device_put(task.ids[:, : int(lens.max())])
    logits, cache = first(model, cache, prompts, jax.device_put(lens))
    out = np.zeros((len(rows), seq, logits.shape[-1]), np.float32)
    known = np.zeros((len(rows), seq), bool)
    for step in range(task.count):
        out[rows, lens - 1 + step], known[rows, lens - 1 + step] = np.asarray(logits), True
        tokens = jax.device_put(task.ids[rows, lens + step])
        logits, cache = following(model, cache, tokens, jax.device_put(lens + np.int32(step)))
    out[rows, lens - 1 + task.count], known[rows, lens - 1 + task.count] = np.asarray(logits), True
    return Measured(out, known)


def _compare(model: Model, stage: Setting, task: Task, wanted: Measured) -> dict[str, Any]:
    """One line of the table: the error against the reference, and the greedy tokens."""
    if stage.options == REFERENCE:
        found, tokens = wanted, task.greedy
    else:
        found = measure(model, stage.options, task)
        tokens = greedy_tokens(model, stage.options, task)
    error, allowed, _ = difference(found, wanted)
    other = _first_other(tokens, task.greedy)
    return {
        "setting": stage.name,
        "max_abs_error": error,
        "allowed": allowed,
        "tokens_equal": other is None,
        "first_other_token": other,
        "equal": error <= allowed and other is None,
    }


def difference(found: Measured, wanted: Measured) -> tuple[float, float, tuple[int, int] | None]:
    """The largest error, what is allowed, and the first (prompt, position) beyond that.

    Allowed is 1e-4, times the largest logit if that is above 1. NaN counts as infinite.
    """
    import numpy as np

    known = found.known & wanted.known
    errors = np.abs(found.logits - wanted.logits).max(axis=-1)
    errors = np.where(known, np.nan_to_num(errors, nan=np.inf), 0.0)
    scale = np.abs(wanted.logits[known]).max()
    allowed = TOLERANCE * max(1.0, float(scale) if np.isfinite(scale) else 1.0)
    beyond = np.argwhere((errors > allowed).T)  # by position first
    first = (int(beyond[0][1]), int(beyond[0][0])) if len(beyond) else None
    return min(float(errors.max()), float(np.finfo(np.float32).max)), allowed, first


def _first_other(found: list[list[int]], wanted: list[list[int]]) -> dict[str, int] | None:
    differing = (
        (index, prompt)
        for prompt, (mine, theirs) in enumerate(zip(found, wanted, strict=True))
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True))
        if a != b
    )
    first = min(differing, default=None)
    return None if first is None else {"prompt": first[1], "token": first[0]}


def greedy_tokens(model: Model, options: ExecutionOptions, task: Task) -> list[list[int]]:
    """What the engine generates under a setting, all prompts in one batch."""
    from rooflax.engine.buckets import bucket
    from rooflax.engine.engine import Engine
    from rooflax.engine.sampling_params import SamplingParams
    from rooflax.engine.sequence import Sequence as EngineSequence
    from rooflax.nn.engine_config import EngineConfig

    params = SamplingParams(temperature=0.0).with_defaults({})
    sequences = [
        EngineSequence(row, task.ids[row, :n].tolist(), params, task.count, frozenset())
        for row, n in enumerate(task.prompt_lens)
    ]
    engine = Engine(
        model.stacked() if options.layers == "scan" else model,
        EngineConfig(
            options=options,
            max_num_seqs=bucket(len(sequences)),
            max_model_len=min(bucket(task.ids.shape[1], 256), model.max_model_len),
        ),
    )
    engine.warm_up(sequences)
    engine.add(sequences)
    while engine.has_unfinished:
        engine.step()
    return [sequence.output_tokens for sequence in sequences]


def locate(
    model: Model,
    before: ExecutionOptions,
    after: ExecutionOptions,
    task: Task,
    row: dict[str, Any],
) -> dict[str, Any]:
    """Which layer and position differ first between two settings.

    Returns:
        "layer" (None: none of them, see "where"), "prompt", "position", "where", "error".
    """
    if row["max_abs_error"] <= row["allowed"]:
        other = row["first_other_token"]
        position = int(task.prompt_lens[other["prompt"]]) + other["token"]
        where = "the engine: scheduling, shapes or sampling"
        return _place(None, (other["prompt"], position), where, row["max_abs_error"])

    def differ(count: int) -> tuple[float, tuple[int, int] | None]:
        short = truncated(model, count)
        options = [before, after]
        if count == 0:
            options = [replace(o, layers="unrolled", use_cache=False) for o in options]
        error, _, first = difference(*(measure(short, o, task) for o in reversed(options)))
        return error, first

    low, high = 0, model.config.num_layers  # a model of `high` layers differs
    found = differ(high)
    if found[1] is None:  # small steps that add up: no single option is beyond the limit
        return _place(None, None, "errors of several options added up", row["max_abs_error"])
    error, first = differ(0)
    if first is not None:
        return _place(None, first, "the embedding, the last norm or the head", error)
    while high - low > 1:
        middle = (low + high) // 2
        tried = differ(middle)
        if tried[1] is None:
            low = middle
        else:
            high, found = middle, tried
    return _place(high - 1, found[1], f"layer {high - 1}", found[0])


def _place(
    layer: int | None, at: tuple[int, int] | None, where: str, error: float
) -> dict[str, Any]:
    prompt, position = at if at is not None else (None, None)
    return {
        "layer": layer, "prompt": prompt, "position": position, "where": where, "error": error,
    }  # fmt: skip


def truncated(model: Model, num_layers: int) -> Model:
    """The model cut off after `num_layers` layers, with its last norm and head."""
    config = model.config
    if not 0 <= num_layers <= config.num_layers:
        raise RequestError(f"a model of {config.num_layers} layers has no first {num_layers}.")
    weights = model.weights | {"layers": model.weights["layers"][:num_layers]}
    return replace(model, weights=weights, config=config.first(max(1, num_layers)))
