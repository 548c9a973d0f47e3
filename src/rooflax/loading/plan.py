"""`Plan`: how a model will run and what it will take, resolved before anything is loaded.

What was asked for meets the model, the platform and the memory here, and nowhere else. Only
config.json and the headers of the weight files are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from jax.sharding import Mesh

from rooflax.errors import RequestError
from rooflax.fields.declaration import declarations, read_settings, takes
from rooflax.fields.kinds import is_whole
from rooflax.loading.adapter_bank import Bank, open_bank
from rooflax.loading.adapters import Adapter, open_adapter
from rooflax.loading.model_info import ModelInfo, model_info
from rooflax.loading.packed import is_packed
from rooflax.loading.schemes import KeptCodes
from rooflax.loading.settings import DEFAULT_NUM_SEQS, EngineSettings
from rooflax.models.memory import (
    ONE_DEVICE,
    MemoryEstimate,
    check_fits,
    estimate,
    padding,
    plan_blocks,
    rope_bytes,
)
from rooflax.models.model import resolve_max_model_len
from rooflax.models.offloading import OffloadPlan, plan_offloading
from rooflax.nn.device_memory import free_bytes
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import (
    DEFAULT_DRAFT_TOKENS,
    NGRAM,
    ExecutionOptions,
    Precision,
    check_speculate,
    offloading_options,
    parse_bytes,
)
from rooflax.nn.layout import SNAPSHOT_BYTES, blocks_needed
from rooflax.nn.mesh import make_mesh, shards_of
from rooflax.nn.shard_sizes import config_on
from rooflax.nn.shards import Shards
from rooflax.nn.storage import Storage
from rooflax.ops import accelerator, kernels
from rooflax.ops.format_names import format_on
from rooflax.ops.linear.api import LINEAR
from rooflax.ops.native import prefers_pairs

PLANNED = frozenset(declarations(EngineSettings))
"""The arguments of `LLM` that a plan decides."""
CACHE_SHARE = 0.5
"""Share of the memory beside the weights that a server's KV cache takes."""
STEP_S = 0.3
"""A server's steps take at most about this long: its prompts are cut to what fits."""
BURST_S = 0.04
"""A server's dispatches of decode steps take at most about this long, and streams look smooth."""
SMALL_CONTEXT = 256
"""Tokens whose KV cache must fit beside the weights, or the model is not loaded."""


class StateRows(NamedTuple):
    """State rows of recurrent layers.

    Attributes:
        row_bytes: of one sequence's state in all of them.
        num_running: rows of running sequences and their drafts.
        num_snapshots: rows that the prefix cache keeps.
        budget_bytes: the most that snapshots may take.
    """

    row_bytes: int
    num_running: int
    num_snapshots: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan(EngineConfig):
    """Decisions about a model, made before its weights are read.

    Attributes:
        info: the model.
        storage: the format or dtype of each weight, and the dtype of the activations.
        shards: into how many parts the mesh splits each axis.
        offloading: which layers stay in memory and which are read at every step; None without a
            weights budget.
        draft: of the smaller model that drafts tokens; None without one.
        adapter: a LoRA adapter beside the weights; None without one.
        bank: slots of adapters that requests choose from; None without any.
        generation_config: "none" leaves the checkpoint's defaults of sampling out.
        memory: bytes on each device, with this KV cache.
    """

    info: ModelInfo
    storage: Storage
    mesh: Mesh | None = None
    shards: Shards
    offloading: OffloadPlan | None
    draft: Plan | None
    adapter: Adapter | None = None
    bank: Bank | None = None
    generation_config: str = "auto"
    memory: MemoryEstimate

    @property
    def precision(self) -> Precision:
        """The widths with nothing left open; `quantize` is None if the weights are kept."""
        return Precision(self.storage.dtype, self.kv_dtype, self.storage.quantize)

    @property
    def state_rows(self) -> StateRows | None:
        """State rows in the KV cache; None without recurrent layers."""
        groups = self.info.config.groups
        if groups.state is None:
            return None
        total = self.num_blocks[groups.state] - 1
        running = min(total, self.max_num_seqs * (1 + self.num_draft_tokens))
        return StateRows(groups.row_bytes(), running, total - running, SNAPSHOT_BYTES)

    @property
    def is_offloaded(self) -> bool:
        """Whether layers are read from the file at every step."""
        return self.offloading is not None and bool(self.offloading.offloaded)

    @property
    def load_bytes(self) -> int:
        """Approximate bytes of weights that loading reads and keeps."""
        if self.offloading is not None:
            plan = self.offloading
            return plan.fixed_bytes + sum(plan.layer_bytes) - plan.bytes_per_step
        config = self.info.config
        whole = self.estimate(shards=ONE_DEVICE).weights
        return whole - rope_bytes(config, self.max_model_len)

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of weights that are codes in the checkpoint and numbers in memory."""
        config, storage = self.info.config, self.storage
        params = (param for param in config.params() if param.name in storage.dequantized)
        return sum(storage.of(param, config).num_bytes() for param in params)

    def estimate(
        self,
        num_seqs: int | None = None,
        max_tokens: int | None = None,
        *,
        shards: Shards | None = None,
        num_blocks: tuple[int, ...] | None = None,
    ) -> MemoryEstimate:
        """Bytes on each device with another KV cache than the plan's, or on another mesh.

        Args:
            num_seqs: sequences that run at once; None is the plan's number.
            max_tokens: of each of them; None is the plan's longest context.
            num_blocks: of the KV cache; None is enough for all sequences.
        """
        widths = self._widths(num_seqs, max_tokens, shards)
        at_once = widths["rows"] * widths["tokens"]
        if self.options.use_cache:
            at_once = min(at_once, max(self.max_tokens_per_step, widths["rows"]))
        need = estimate(
            self.info.config,
            **widths,
            step_tokens=at_once,
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            draft_tokens=self.num_draft_tokens,
        )
        if self.offloading is not None:
            need = replace(need, weights=self.offloading.memory_bytes)
        if self.adapter is not None:
            need = replace(need, weights=need.weights + self.adapter.nbytes)
        if self.bank is not None:
            need = replace(need, weights=need.weights + self.bank.nbytes)
        return need

    def with_bank(
        self, loras: Sequence[str], max_loras: int | None = None, max_rank: int | None = None
    ) -> Plan:
        """The plan with adapters that requests choose from, each as NAME=DIR.

        Args:
            max_loras: slots; None is as many as there are adapters.
            max_rank: of an adapter; None is the largest of theirs.

        Raises:
            RooflaxError: a name twice, a folder that holds no adapter of the model, or more than
                the slots hold.
        """
        _check_adaptable(self.mesh, self.offloading)
        if self.adapter is not None:
            raise RequestError("lora is for all requests, and loras are chosen; give one of them.")
        bank = open_bank(loras, self.info, max_loras, max_rank, self.storage.adapter_dtype)
        plan = replace(self, bank=bank)
        return plan._with_blocks(plan.num_blocks)

    def padding(self) -> dict[str, int]:
        """Bytes of the estimate that only fill tiles and parts up, by the size that is padded."""
        return padding(self.info.config, **self._widths(None, None, None))

    def _widths(
        self, num_seqs: int | None, max_tokens: int | None, shards: Shards | None
    ) -> dict[str, Any]:
        return {
            "storage": self.storage,
            "kv_dtype": self.kv_dtype,
            "rows": num_seqs or self.max_num_seqs,
            "tokens": max_tokens or self.max_model_len,
            "prefill_chunk": self.prefill_chunk,
            "shards": shards or self.shards,
        }

    def check_fits(self, num_seqs: int | None = None, max_tokens: int = SMALL_CONTEXT) -> None:
        """Rejects what does not fit into the memory that is free, with the arithmetic.

        Args:
            num_seqs: of `max_tokens`, whose KV cache is needed while the weights are there; None
                is the weights, with those of a drafting model, and a small KV cache.

        Raises:
            RequestError: more memory is needed than is free.
        """
        need = self.estimate(num_seqs or 1, min(max_tokens, self.max_model_len))
        what = self.info.name
        if num_seqs is not None:
            need, what = replace(need, weights=0), f"{what} with {num_seqs} x {max_tokens} tokens"
        elif self.draft is not None:
            what = f"{what} with {self.draft.info.name} drafting"
            need = replace(need, weights=need.weights + self.draft.memory.weights)
        if num_seqs is None and self.shards != ONE_DEVICE:
            what = f"{what} on each device of {self.shards}"
        check_fits(need, free_bytes(self.shards.num_devices), what)

    def serving(self, *, max_tokens_per_step: int | None = None, num_blocks: object = None) -> Plan:
        """The plan of a server, whose KV cache is allocated once.

        Args:
            max_tokens_per_step: prompt tokens and decoding sequences of one step; None is 512, on a
                GPU 2,048.
            num_blocks: of the KV cache, per layer group; None is enough for all sequences, or for
                as many as fit into half of the memory that is free beside the weights.

        Raises:
            RequestError: the weights do not fit, or not even one sequence of `max_model_len` does,
                with the arithmetic.
        """
        per_step = max(max_tokens_per_step or accelerator.prefill_chunk(), self.max_num_seqs)
        chunk = min(per_step, accelerator.prefill_chunk(), self.max_model_len)
        plan = replace(
            self,
            prefill_chunk=chunk,
            max_tokens_per_step=per_step,
            step_s=STEP_S if max_tokens_per_step is None else None,
            burst_s=BURST_S,
            isolates_faults=True,
        )
        if num_blocks is not None:
            num_groups = len(self.info.config.cached_windows)
            return plan._with_blocks(_checked_blocks(num_blocks, num_groups))
        free = free_bytes(self.shards.num_devices)
        if free is not None and free < self.memory.weights:
            self.check_fits()
        if free is not None:
            free -= self.memory.weights
            if self.draft is not None:
                tokens = min(self.max_model_len, self.draft.max_model_len)
                draft = self.draft.estimate(self.max_num_seqs, tokens)
                free -= draft.weights + draft.kv_cache
            free = int(CACHE_SHARE * max(0, free * self.shards.tensor * self.shards.stage))
        return plan._with_blocks(plan._blocks(free))

    def full_length_seqs(self) -> int:
        """Number of sequences of `max_model_len` that the KV cache holds at once."""
        windows, size = self.info.config.cached_windows, accelerator.block_size()
        lengths = (self.max_model_len, self.new_tokens, size, 1 + self.num_draft_tokens)
        per_seq = [blocks_needed(window, *lengths) for window in windows]
        pairs = zip(self.num_blocks, per_seq, strict=True)
        return min([(n - 1) // each for n, each in pairs], default=self.max_num_seqs)

    def _blocks(self, limit_bytes: int | None = None) -> tuple[int, ...]:
        return plan_blocks(
            config_on(self.info.config, self.shards),
            kv_dtype=self.kv_dtype,
            num_slots=self.max_num_seqs,
            max_tokens=self.max_model_len,
            new_tokens=self.new_tokens,
            block_size=accelerator.block_size(),
            draft_tokens=self.num_draft_tokens,
            limit_bytes=limit_bytes,
        )

    def _with_blocks(self, num_blocks: tuple[int, ...]) -> Plan:
        return replace(self, num_blocks=num_blocks, memory=self.estimate(num_blocks=num_blocks))


@takes(EngineSettings)
def make_plan(
    model: str | Path | ModelInfo | Plan | None = None, **settings: Unpack[EngineSettings]
) -> Plan:
    """Resolves what was asked for; the arguments are those of `LLM`.

    `mesh` may also be the parts alone, for a mesh that need not be here; such a plan cannot be
    loaded.

    Args:
        model: as for `LLM`.
        settings: as `EngineSettings` declares them.

    Raises:
        RooflaxError: one sentence that says what is wrong, with the arithmetic.
    """
    given = read_settings("make_plan", settings, EngineSettings)
    asked: dict[str, Any] = {
        name: value
        for name, value in given.items()
        if value is not None and value is not False and value != ()  # 0 is no way to say nothing
    }
    prefix_caching = given.get("prefix_caching")
    prefix_caching = True if prefix_caching is None else prefix_caching
    if isinstance(model, Plan):
        _check_decided(asked)
        return model if prefix_caching else replace(model, prefix_caching=False)
    options = _checked_options(asked.get("options"))
    num_seqs = asked.get("max_num_seqs", DEFAULT_NUM_SEQS)
    speculate, num_draft_tokens = asked.get("speculate"), given.get("num_draft_tokens")
    check_speculate(speculate, num_draft_tokens, options.use_cache)
    precision = Precision(*(given.get(name) for name in ("dtype", "kv_dtype", "quantize")))
    budget = given.get("weights_budget")
    budget = None if budget is None else parse_bytes(budget)
    mesh = given.get("mesh")
    native = kernels.chosen(options.kernels)["linear"] == "native"
    options = options.with_layers(kernels_read_stacks=native and mesh is None and budget is None)
    offloaded = options if budget is None else offloading_options(options, mesh is not None)
    mesh, shards = _resolved_mesh(mesh)
    info = model
    if not isinstance(info, ModelInfo):
        where = ("revision", "offline", "ignore_config_keys")
        info = model_info(info, **{name: asked[name] for name in where if name in asked})
    generation_config = asked.get("generation_config", "auto")
    length = resolve_max_model_len(info.config, given.get("max_model_len"))
    own_kv_dtype, storage = resolve_precision(
        info,
        precision,
        accelerator.platform(),
        reads_bfloat16=LINEAR.preferred(options.kernels).keeps_bf16,
    )
    if native and prefers_pairs():
        storage = replace(storage, pairs_bfloat16=True)
    if shards.stage > 1:
        _check_stages(info, storage)
    offloading = None if budget is None else _plan_offloading(info, storage, length, budget)
    if offloading is not None:
        storage = replace(storage, offloaded=frozenset(offloading.offloaded))
    adapter = None
    if "lora" in asked:
        _check_adaptable(mesh, offloading)
        adapter = _opened_adapter(asked["lora"], info)
    draft = None
    if speculate is not None and speculate != NGRAM:
        same = ("quantize", "dtype", "kv_dtype", "offline", "ignore_config_keys")
        same_values = {name: asked[name] for name in same if name in asked}
        draft = make_plan(speculate, options=options, mesh=mesh, **same_values)
    chunk = min(accelerator.prefill_chunk(), length)
    plan = Plan(
        info=info,
        storage=storage,
        kv_dtype=own_kv_dtype,
        options=offloaded if offloading and offloading.offloaded else options,
        max_model_len=length,
        max_num_seqs=num_seqs,
        prefill_chunk=chunk,
        max_tokens_per_step=max(chunk, num_seqs),
        mesh=mesh,
        shards=shards,
        offloading=offloading,
        draft=draft,
        adapter=adapter,
        num_draft_tokens=0 if speculate is None else num_draft_tokens or DEFAULT_DRAFT_TOKENS,
        prefix_caching=prefix_caching,
        generation_config=generation_config,
        memory=MemoryEstimate(0, 0, 0),
    )
    return plan._with_blocks(plan._blocks())


def resolve_precision(
    info: ModelInfo, asked: Precision, platform: str, *, reads_bfloat16: bool
) -> tuple[str, Storage]:
    """The dtype of the KV cache, and the width of every weight.

    Without a dtype, activations are float32 on CPU and bfloat16 elsewhere, weights that the
    checkpoint holds quantized stay so, and bfloat16 ones do where kernels read them beside float32.
    config.json says whether weights are bfloat16, or the tensors where it says nothing; each
    tensor's own type decides as it is read. The KV cache is as wide as the activations, but float16
    beside float32 on a CPU where weights or activations are rounded, which is far coarser.

    Args:
        reads_bfloat16: whether linear's kernel multiplies bfloat16 weights by float32.

    Raises:
        RequestError: a format is asked for, and the checkpoint is quantized already.
    """
    if is_packed(info.raw_config) and asked.quantize is not None:
        raise RequestError(
            f"{info.name} is quantized already; leave `quantize` out, or give the checkpoint that "
            f"it was made from.",
            param="quantize",
        )
    auto = asked.dtype is None
    dtype = asked.dtype or ("float32" if platform == "cpu" else "bfloat16")
    prequantized, dequantized = {}, frozenset[str]()
    if (auto or is_packed(info.raw_config)) and asked.quantize is None and info.folder is not None:
        source = info.prequantized()
        merged = {param.name for param in info.config.params() if param.key in info.changed}
        prequantized = {n: format for n, format in source.formats.items() if n not in merged}
        dequantized = source.dequantized if isinstance(source, KeptCodes) else dequantized
        dequantized |= merged & source.formats.keys()
    keeps_bfloat16 = auto and reads_bfloat16 and _is_bfloat16(info)
    quantize = asked.quantize and format_on(platform, asked.quantize)
    storage = Storage(dtype, quantize, keeps_bfloat16, prequantized, dequantized)
    is_coarse = storage.quantizes_activations and dtype == "float32" and platform == "cpu"
    return asked.kv_dtype or ("float16" if is_coarse else dtype), storage


def _check_decided(asked: Mapping[str, Any]) -> None:
    """
    Raises:
        RequestError: a setting stands beside a plan.
    """
    for name in asked:
        if name != "prefix_caching":
            raise RequestError(
                f"{name} is given beside a Plan, which has decided it; give it to make_plan.",
                param=name,
            )


def _opened_adapter(folder: Any, info: ModelInfo) -> Adapter:
    if not isinstance(folder, str | Path):
        raise RequestError(f"lora is {folder!r:.80}; it must be a folder.", param="lora")
    return open_adapter(folder, info)


def _check_adaptable(mesh: Mesh | None, offloading: OffloadPlan | None) -> None:
    """
    Raises:
        RequestError: what an adapter does not go with.
    """
    if mesh is not None:
        raise RequestError("lora is for one device; leave the mesh out.", param="lora")
    if offloading is not None and offloading.offloaded:
        raise RequestError(
            "lora is for weights in memory; leave the weights budget out.", param="lora"
        )


def _check_stages(info: ModelInfo, storage: Storage) -> None:
    """Rejects layers that differ, because stages lie in one array.

    Raises:
        RequestError: the checkpoint has a weight in several formats.
    """
    formats: dict[str, set[str]] = {}
    for param in info.config.params():
        if param.layer is not None and (format := storage.prequantized.get(param.name)):
            formats.setdefault(param.key, set()).add(format)
    for key, kinds in formats.items():
        if len(kinds) > 1:
            raise RequestError(
                f"{info.name} has {key} in {' and '.join(sorted(kinds))}, and stages have layers "
                f"that are alike; choose another mesh, or give a `dtype` or `quantize`.",
                param="mesh",
            )


def _is_bfloat16(info: ModelInfo) -> bool:
    """Whether the checkpoint's weights are bfloat16, or some of them if config.json is silent."""
    declared = {str(info.raw_config.get(key)) for key in ("torch_dtype", "dtype")}
    if declared == {"None"} and info.folder is not None and info.gguf is None:
        source = info.weights()
        return any(source.info(name).dtype == "BF16" for name in source.names())
    return "bfloat16" in declared


def _plan_offloading(info: ModelInfo, storage: Storage, length: int, budget: int) -> OffloadPlan:
    """Plans which layers stay in memory within the budget of bytes.

    Raises:
        RequestError: there is no file to read from, or the budget is too small.
    """
    if info.folder is None:
        raise RequestError(
            f"{info.name} has random weights and no file to read them from; leave the weights "
            f"budget out, or save it as a checkpoint first."
        )
    groups = info.config.groups
    if info.config.per_layer or groups.keeping() != groups.attending():
        raise RequestError(
            f"{info.name} has layers that need more than the layer before gives (an embedding per "
            f"layer, or another layer's keys and values), which rooflax does not run one by one; "
            f"leave the weights budget out.",
            param="weights_budget",
        )
    reader = info.reader(storage)
    fixed, layers = rope_bytes(info.config, length), [0] * info.config.num_layers
    for param in reader.params:
        if param.layer is None:
            fixed += reader.num_bytes(param)
        else:
            layers[param.layer] += reader.num_bytes(param)
    return plan_offloading(budget, fixed, layers, info.name)


def _checked_options(options: Any) -> ExecutionOptions:
    options = ExecutionOptions() if options is None else options
    if not isinstance(options, ExecutionOptions):
        raise RequestError(
            f"options is {options!r:.80}; it must be ExecutionOptions.", param="options"
        )
    kernels.check_kernels(options.kernels)
    return options


def _resolved_mesh(mesh: Any) -> tuple[Mesh | None, Shards]:
    if not isinstance(mesh, str | Mesh | Shards | None):
        raise RequestError(
            f"mesh is {mesh!r}; it must be a Mesh, or text like tensor=4,data=2.", param="mesh"
        )
    if isinstance(mesh, Shards):
        return None, mesh
    mesh = make_mesh(mesh) if isinstance(mesh, str) else mesh
    return mesh, shards_of(mesh) or ONE_DEVICE


def _checked_blocks(num_blocks: Any, num_groups: int) -> tuple[int, ...]:
    numbers = num_blocks if isinstance(num_blocks, tuple | list) else ()
    whole = all(is_whole(n, int) and n > 1 for n in numbers)
    if len(numbers) != num_groups or not whole:
        raise RequestError(
            f"kv_blocks is {num_blocks!r}; it must be {num_groups} whole numbers from 2 up, one "
            f"for each group of layers.",
            param="kv_blocks",
        )
    return tuple(numbers)
