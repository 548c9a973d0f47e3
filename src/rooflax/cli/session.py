"""Opening a model for a verb: JAX started, progress shown, settings said."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, terminal
from rooflax.loading.settings import EngineSettings
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.shards import parse_mesh

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM
    from rooflax.llm import LLM
    from rooflax.loading.plan import Plan


def not_applied(names: Sequence[str], quantizes_activations: bool) -> list[str]:
    """Settings of a quantization scheme that are not applied, with what follows for activations.

    Args:
        names: `ModelInfo.not_applied`.
        quantizes_activations: the format that was asked for rounds them in its own way.
    """
    is_exact = any("activation" in name for name in names) and not quantizes_activations
    return [*names, *["so activations are more exact than in the scheme's own runtime"] * is_exact]


def open_llm(args: argparse.Namespace, **settings: Any) -> LLM:
    """The model that the flags name, loaded.

    Flags are checked before JAX is imported, and the model's config before its weights are read.

    Args:
        settings: further arguments of `LLM`, in place of what the flags say.

    Raises:
        RooflaxError: with the reason.
    """
    llm = _loaded(args, *_checked(args, settings), _make_llm)
    if args.verbose:
        say_settings(llm)
    return llm


def find_plan(args: argparse.Namespace, **settings: Any) -> Plan:
    """Plan that `open_llm` would load.

    Raises:
        RooflaxError: with the reason.
    """
    return _loaded(args, *_checked(args, settings), lambda plan, **options: plan)


def open_async_llm(args: argparse.Namespace, **settings: Any) -> AsyncLLM:
    """As `open_llm`, with an engine for many callers, warm.

    Args:
        settings: further arguments of `AsyncLLM`.
    """
    llm = _loaded(args, *_checked(args, settings), _make_async_llm)
    if args.verbose:
        say_settings(llm.llm)
    return llm


def follow(args: argparse.Namespace, **settings: Any) -> None:
    """Repeats the device calls of `open_async_llm`'s engine in process 0, until that ends."""
    _loaded(args, *_checked(args, settings), _follow)


def _make_llm(*args: Any, **settings: Any) -> LLM:
    from rooflax.llm import LLM

    return LLM(*args, **settings)


def _follow(*args: Any, **settings: Any) -> None:
    from rooflax.async_llm import AsyncLLM

    AsyncLLM.follow(*args, **settings)


def _make_async_llm(*args: Any, **settings: Any) -> AsyncLLM:
    from rooflax.async_llm import AsyncLLM

    return AsyncLLM(*args, **settings)


def _checked(
    args: argparse.Namespace, settings: dict[str, Any]
) -> tuple[ExecutionOptions | None, dict[str, Any], dict[str, Any]]:
    """Options, where the model is, and arguments of `LLM`, before JAX is imported."""
    options = settings.pop("options", None)
    execution = options or flags.execution_options(args)
    flags.check_speculation(args, execution)
    flags.check_weights_budget(args, execution)
    precision = flags.check_precision(args)
    settings = {"dtype": precision.dtype, "kv_dtype": precision.kv_dtype} | settings
    mesh_text = getattr(args, "mesh", None)
    if mesh_text is not None:
        parse_mesh(mesh_text)
    platform.check_processes(args)
    return options, flags.find_arguments(args), settings


def _loaded(
    args: argparse.Namespace,
    options: ExecutionOptions | None,
    where: dict[str, Any],
    settings: dict[str, Any],
    make: Callable[..., Any],
) -> Any:
    with terminal.status("starting JAX", args.quiet):
        platform.start_jax(args)
        options = options or flags.execution_options(args)
        from rooflax.loading.plan import PLANNED, make_plan

    if options.kernels is None and not args.quiet:
        say_without_kernels()
    values = flags.values_of(args, EngineSettings) | where | settings
    values["mesh"] = platform.make_mesh(values.get("mesh"))
    values["check"] = getattr(args, "check", False)
    planned = {name: values.pop(name) for name in PLANNED & values.keys()}
    plan = make_plan(args.model, options=options, **planned)
    if planned.get("generation_config") == "auto":  # the verb generates
        plan.info.generation_defaults().check()
    name, is_random = plan.info.name, plan.info.folder is None
    shown = Path(name).name if Path(name).is_file() else name
    if plan.info.left_out and not args.quiet:
        towers = " and ".join(plan.info.left_out)
        terminal.say(f"{name}: its text model is used, its {towers} tower is left out.")
    if plan.info.not_applied and not args.quiet:
        names = not_applied(plan.info.not_applied, plan.storage.quantizes_activations)
        terminal.say(f"{name}: not applied: {', '.join(names)}.")
    if plan.adapter is not None and plan.adapter.config.warning and not args.quiet:
        terminal.say(plan.adapter.config.warning)
    with (
        terminal.byte_progress(f"loading {shown}", plan.load_bytes, args.quiet) as bar,
        terminal.status(f"loading {shown}", args.quiet or not is_random),
    ):
        return make(plan, progress=bar.update, **values)


def say_without_kernels() -> None:
    """Says why JAX's CPU runs without the native kernels, if it does."""
    import jax

    from rooflax.ops import native

    if jax.default_backend() == "cpu" and not native.is_ready():
        terminal.say(f"Slower than with native kernels: {native.status().reason}.", is_faint=True)


def say_settings(llm: LLM) -> None:
    """Prints the settings for --verbose: device, formats, switches, caches and expected speed."""
    import jax

    from rooflax.bench.prediction import summary
    from rooflax.engine.compilation import enable_persistent_cache

    device = jax.devices()[0]
    count = 1 if llm.mesh is None else llm.mesh.size
    rows = [
        ("model", f"{llm.info.name} ({llm.info.family})"),
        ("folder", str(llm.info.folder or "none, random weights")),
        ("device", f"{count} x {device.device_kind} ({device.platform})"),
        ("threads", os.environ.get(platform.THREADS_VARIABLE, "JAX's choice")),
        ("dtype", f"{llm.plan.storage.dtype}, KV cache {llm.plan.kv_dtype}"),
        ("options", llm.options.describe()),
        ("context", f"{llm.max_model_len} tokens"),
        ("compile cache", str(enable_persistent_cache() or "off")),
    ]
    plan = llm.offload_plan
    if plan is not None:
        layers = f"{plan.num_resident} of {len(plan.layer_bytes)} stay, the others are offloaded"
        rows.append(("layers", layers))
    expected = summary(llm.plan)
    if expected is not None:
        rows.append(("expected", expected))
    for line in terminal.table(rows):
        terminal.say(line)
