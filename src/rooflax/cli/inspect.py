"""`rooflax inspect`: architecture, weights and the memory a model will take, without loading it.

Only config.json and the headers of the weight files are read, of a model on the hub too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import textwrap
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, session, terminal
from rooflax.cli.main import parser_of, with_flags
from rooflax.cli.models import billions
from rooflax.cli.parser import Parser, at_least_one
from rooflax.errors import RequestError
from rooflax.nn.execution import ExecutionOptions, gib
from rooflax.nn.layout import STATE
from rooflax.nn.shards import Shards, parse_mesh

if TYPE_CHECKING:
    from rooflax.loading.model_info import ModelInfo
    from rooflax.models.memory import MemoryEstimate
    from rooflax.models.offloading import OffloadPlan
    from rooflax.nn.decoder import Decoder


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, also=", or the URL of a .gguf file")
    flags.add_max_model_len(parser, help="tokens per sequence to plan for")
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    parser.group("memory and precision").add_argument(
        "--batch", metavar="N", type=at_least_one, default=1, help="sequences at once; default 1"
    )
    flags.add_device(parser, mesh=True)
    flags.add_output(parser, progress=False)


def run(args: argparse.Namespace) -> int:
    """Prints what is known before loading."""
    flags.check_precision(args)
    flags.check_weights_budget(args, ExecutionOptions())
    shards = parse_mesh(args.mesh) if args.mesh is not None else None
    platform.start_jax(args)
    from rooflax.loading.hub import headers
    from rooflax.loading.model_info import model_info

    where = flags.find_arguments(args)
    ignored = where.pop("ignore_config_keys")
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(headers(args.model, **where)) if args.model else None
        if copy is None:
            info = model_info(args.model, ignore_config_keys=ignored, **where)
        else:
            info = replace(model_info(copy, ignore_config_keys=ignored), name=args.model)
        report = document(info, args, shards)
    if copy is not None and not copy.exists():
        report["folder"] = None
    if args.json:
        terminal.print_json(report)
    else:
        for line in lines(report):
            print(line)
    return 0


def document(info: ModelInfo, args: argparse.Namespace, shards: Shards | None) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    needed = memory(info, args, shards)
    is_unknown = shards or needed["fits"] is False or not info.config.is_causal
    return {
        "model": info.name,
        "family": info.family,
        "folder": str(info.folder) if info.folder else None,
        "left_out": list(info.left_out),
        "architecture": architecture(info.config),
        "weights": weights(info),
        "memory": needed,
        "speed": None if is_unknown else speed(info, args),
    }


def speed(info: ModelInfo, args: argparse.Namespace) -> dict[str, Any] | None:
    """Tokens per second to expect here; None where nothing is predicted."""
    from rooflax.bench.prediction import predict
    from rooflax.loading.plan import make_plan

    return predict(make_plan(info, **_asked(args), max_num_seqs=args.batch))


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a plan from the flags."""
    return {
        **vars(flags.check_precision(args)),
        "max_model_len": args.max_model_len,
        "weights_budget": args.weights_budget,
    }


def architecture(config: Decoder) -> dict[str, Any]:
    """Sizes, and what the layers are made of; of several kinds of layer, how many of each."""
    from rooflax.nn.latent import LatentAttention
    from rooflax.nn.parts import Mlp

    attention, moe = config.attention, config.moe
    rows: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    if moe is not None:
        dense = [layer.mlp.width for layer in config.layers if isinstance(layer.mlp, Mlp)]
        rows["intermediate_size"] = max(dense, default=moe.width)
        rows |= {"num_experts": moe.num_experts, "experts_per_token": moe.experts_per_token}
        if dense:
            rows |= {"num_dense_layers": len(dense), "moe_intermediate_size": moe.width}
        rows |= {"shared_expert_intermediate_size": moe.shared} if moe.shared else {}
    rows |= {
        "max_position": config.max_position,
        "norm_eps": config.norm.eps,
        "tied_embeddings": config.tied_embeddings,
    }
    if isinstance(attention, LatentAttention):
        sizes = ("rank", "query_rank", "nope_dim", "rope_dim", "value_dim", "bias")
        rows |= {f"latent_{name}": getattr(attention, name) for name in sizes}
    else:
        rows |= {
            "qkv_bias": attention.qkv_bias,
            "output_bias": attention.output_bias,
            "qk_norm": attention.qk_norm is not None,
            "sinks": attention.sinks,
        }
    for rope in config.ropes:
        rows["rope_theta"] = rope.theta
        rows["rope_scaling"] = rope.scaling.to_hf() if rope.scaling else None
    windows = Counter(_window_name(layer.attention.window) for layer in config.layers)
    if set(windows) != {"full"}:
        rows["layer_windows"] = dict(windows)
    groups = config.groups
    kept = [groups.heads[layer] for layer in groups.attending()]
    heads = Counter(f"{each.num} x {each.dim}" for each in kept)
    if len(heads) > 1:
        rows["layer_kv_heads"] = dict(heads)
    if shared := len(groups.attending()) - len(groups.keeping()):
        rows["layers_without_own_kv"] = shared
    keep = [layer.attention for layer in config.layers if layer.attention.window != STATE]
    if config.ropes and (without := sum(attention.rope is None for attention in keep)):
        rows["layers_without_rope"] = without
    return rows


def _window_name(window: int | None) -> str:
    return {None: "full", STATE: "state"}.get(window, f"window {window}")


def weights(info: ModelInfo) -> dict[str, Any]:
    """Parameters by part, and the formats of the files."""
    from rooflax.nn.storage import ITEM_BYTES

    config = info.config
    parts: Counter[str] = Counter()
    for param in config.params():
        parts[_part(param.key)] += math.prod(param.line.shape(config.axis_sizes))
    total = sum(parts.values())
    rows = {
        "parameters": total,
        "parameters_by_part": dict(parts.most_common()),
        "formats": None if info.folder is None else formats(info),
        "not_applied": list(info.not_applied),
    }
    if info.folder is None:
        dtype = str(info.raw_config.get("torch_dtype", "float32"))
        rows |= {"published_dtype": dtype, "published_bytes": total * ITEM_BYTES[dtype]}
    return rows


def _part(key: str) -> str:
    """Component that a weight belongs to, by its name in the table."""
    if "norm" in key:
        return "norms"
    names = {"attn": "attention", "conv": "convolution", "delta": "delta rule"}
    names |= {"per_layer": "per-layer embeddings", "scale": "layer scales"}
    for part in ("attn", "router", "experts", "mlp", "conv", "delta", "per_layer", "scale"):
        if part in key:
            return names.get(part, part)
    return key


def formats(info: ModelInfo) -> list[dict[str, Any]]:
    """Tensors and bytes in the files by format, from their headers."""
    from rooflax.loading.checkpoint import Checkpoint

    checkpoint = info.gguf or Checkpoint(info.folder or "")  # as the files have them
    names = set(checkpoint.names())
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in names:
        tensor = checkpoint.info(name)
        kind = "MXFP4" if _is_mxfp4(name, names) else tensor.dtype
        tensors[kind] += 1
        sizes[kind] += tensor.nbytes
    return [
        {"format": kind, "tensors": tensors[kind], "bytes": size}
        for kind, size in sizes.most_common()
    ]


def _is_mxfp4(name: str, names: set[str]) -> bool:
    for end, other in (("_blocks", "_scales"), ("_scales", "_blocks")):
        if name.endswith(end):
            return name.removesuffix(end) + other in names
    return False


def memory(info: ModelInfo, args: argparse.Namespace, shards: Shards | None) -> dict[str, Any]:
    """Memory needed to run the model, and whether it is free."""
    from rooflax.loading.plan import make_plan
    from rooflax.models.memory import ONE_DEVICE
    from rooflax.nn.device_memory import free_bytes

    asked = _asked(args)
    plan = make_plan(info, **asked, mesh=shards, max_num_seqs=args.batch)
    need = plan.estimate(shards=ONE_DEVICE)
    return {
        "batch": plan.max_num_seqs,
        "tokens": plan.max_model_len,
        **vars(plan.precision),
        "format": plan.storage.format,
        "offloading": None if plan.offloading is None else _offloading(plan.offloading),
        "weights_bytes": need.weights,
        "dequantized_bytes": plan.dequantized_bytes,
        "kv_cache_bytes": need.kv_cache,
        "state": plan.state_rows and plan.state_rows._asdict(),
        "workspace_bytes": need.workspace,
        "total_bytes": need.total,
        "padding_bytes": plan.padding(),
        "free_bytes": free_bytes(),
        "server": None if shards else _server(info, asked),
        "mesh": _mesh(shards, plan.memory) if shards else None,
        "fits": _fits(plan.memory, shards),
    }


def _offloading(plan: OffloadPlan) -> dict[str, Any]:
    """Layer offloading that a weights budget leads to."""
    return {
        "budget_bytes": plan.budget_bytes,
        "layers": len(plan.layer_bytes),
        "layers_resident": plan.num_resident,
        "layers_offloaded": len(plan.offloaded),
        "bytes_per_step": plan.bytes_per_step,
    }


def _mesh(shards: Shards, each: MemoryEstimate) -> dict[str, Any]:
    """Memory of each device of a mesh, whether or not it is here."""
    return {
        "axes": {axis: parts for axis, parts in shards.sizes.items() if parts > 1},
        "devices": shards.num_devices,
        "weights_bytes_per_device": each.weights,
        "kv_cache_bytes_per_device": each.kv_cache,
        "workspace_bytes_per_device": each.workspace,
        "total_bytes_per_device": each.total,
    }


def _fits(need: MemoryEstimate, shards: Shards | None) -> bool | None:
    """Whether the devices have room for it; None where they are not here."""
    import jax

    from rooflax.nn.device_memory import free_bytes

    if shards and shards.num_devices > jax.device_count():
        return None
    free = free_bytes(shards.num_devices if shards else 1)
    return None if free is None else need.total <= free


def _server(info: ModelInfo, asked: dict[str, Any]) -> dict[str, Any]:
    """The KV cache of `AsyncLLM` here: for 16 sequences, or for as many as fit."""
    from rooflax.loading.plan import make_plan
    from rooflax.ops.accelerator import block_size

    try:
        plan = make_plan(info, **asked).serving()
    except RequestError as error:
        return {"rejected": str(error)}
    return {
        "sequences": plan.max_num_seqs,
        "of_full_length": plan.full_length_seqs(),
        "kv_blocks": list(plan.num_blocks),
        "block_size": block_size(),
        "kv_cache_bytes": plan.memory.kv_cache,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The document for people."""
    title = f"{report['model']}  ({report['family']})"
    return [
        title,
        "",
        *_section("architecture", _architecture_rows(report["architecture"])),
        *_section("weights", _weight_rows(report["weights"]), right=(1, 2)),
        *_not_applied_lines(report["weights"]["not_applied"], report["memory"]),
        *_section(_memory_title(report["memory"]), _memory_rows(report["memory"]), right=(1,)),
        *_offloading_section(report["memory"]["offloading"]),
        *_mesh_section(report["memory"]["mesh"]),
        *_padding_section(report["memory"]),
        *_speed_section(report["speed"]),
        _verdict(report["memory"]),
        *_server_lines(report["memory"]["server"]),
    ]


def _section(title: str, rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    return [title, *(f"  {line}" for line in terminal.table(rows, right=right)), ""]


def _architecture_rows(known: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, value in known.items():
        if name in ("layer_windows", "layer_kv_heads") and value:
            value = ", ".join(f"{count} x {kind}" for kind, count in value.items())
        elif name == "rope_scaling" and value:
            value = f"{value['rope_type']}, factor {value.get('factor', 1):g}"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif value is None:
            value = "none"
        elif isinstance(value, int):
            value = f"{value:,}"
        if value != ():
            rows.append((name, str(value)))
    return rows


def _weight_rows(known: dict[str, Any]) -> list[tuple[str, ...]]:
    total = known["parameters"]
    rows = [("parameters", billions(total), "")]
    for part, count in known["parameters_by_part"].items():
        rows.append((f"  {part}", billions(count), f"{100 * count / total:.1f}%"))
    for entry in known["formats"] or ():
        tensors = f"{entry['tensors']} tensors"
        rows.append((f"in the file: {entry['format']}", gib(entry["bytes"]), tensors))
    if known["formats"] is None:
        size = f"{known['published_bytes'] / 1e9:,.1f} GB"
        rows.append((f"as published: {known['published_dtype']}", size, "random here"))
    return rows


def _not_applied_lines(names: list[str], memory: dict[str, Any]) -> list[str]:
    shown = session.not_applied(names, memory["quantize"] is not None)
    return ["not applied", *(f"  {name}" for name in shown), ""] if shown else []


def _memory_title(known: dict[str, Any]) -> str:
    sequences = "1 sequence" if known["batch"] == 1 else f"{known['batch']} sequences"
    return f"memory for {sequences} of {known['tokens']:,} tokens"


def _memory_rows(known: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        ("weights", gib(known["weights_bytes"]), known["format"]),
        *_dequantized_rows(known["dequantized_bytes"]),
        ("KV cache", gib(known["kv_cache_bytes"]), known["kv_dtype"]),
        *_state_rows(known["state"]),
        ("workspace", gib(known["workspace_bytes"]), "at most, of one step"),
        ("together", gib(known["total_bytes"]), ""),
    ]
    if known["free_bytes"] is not None:
        rows.append(("free now", gib(known["free_bytes"]), ""))
    return rows


def _dequantized_rows(nbytes: int) -> list[tuple[str, ...]]:
    note = "as numbers: no format holds their codes"
    return [("  dequantized", gib(nbytes), note)] if nbytes else []


def _state_rows(known: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """Rows for the part of the KV cache that recurrent layers take."""
    if known is None:
        return []
    each, snapshots = known["row_bytes"], known["num_snapshots"]
    of = f"{known['num_running']} x {gib(each)} of running sequences"
    kept = f"{snapshots} for the prefix cache, at most {gib(known['budget_bytes'])}"
    return [("  state", gib(each * known["num_running"]), of),
            ("  snapshots", gib(each * snapshots), kept),
            ("  zeros", gib(each), "that a sequence begins with")]  # fmt: skip


def _offloading_section(known: dict[str, Any] | None) -> list[str]:
    if known is None:
        return []
    rows = [
        ("layers that stay", f"{known['layers_resident']} of {known['layers']}"),
        ("layers that are offloaded", str(known["layers_offloaded"])),
        ("read at every step", gib(known["bytes_per_step"])),
    ]
    title = f"weights within a budget of {gib(known['budget_bytes'])}"
    return _section(title, rows, right=(1,))


def _mesh_section(known: dict[str, Any] | None) -> list[str]:
    if known is None:
        return []
    parts = ("weights", "kv_cache", "workspace", "total")
    sizes = [gib(known[f"{part}_bytes_per_device"]) for part in parts]
    names = ("weights", "KV cache", "workspace", "together")
    axes = ",".join(f"{axis}={parts}" for axis, parts in known["axes"].items()) or "one device"
    title = f"on each of {known['devices']} devices ({axes})"
    return _section(title, list(zip(names, sizes, strict=True)), right=(1,))


def _padding_section(known: dict[str, Any]) -> list[str]:
    """Rows for padding to tile sizes, if there is any."""
    where = {
        "head_dim": "heads in the KV cache",
        "block_size": "ends of KV blocks",
        "vocab": "rows of the vocabulary",
    }
    sizes = known["padding_bytes"]
    rows = [
        (where[name], gib(size) if size >= 1 << 20 else f"{size:,} bytes")
        for name, size in sizes.items()
        if size
    ]
    title = f"of that padding{', on the device with most' if known['mesh'] else ''}"
    return _section(title, rows, right=(1,)) if rows else []


def _speed_section(known: dict[str, Any] | None) -> list[str]:
    """Rows for the predicted speed, from the ceilings now and the efficiency of other models."""
    if known is None:
        return []
    names = {"decode 1": "1 row", "decode 8": "8 rows", "prompts 8": "prompts, 8 of 64 tokens"}
    rows = [
        (
            names[kind],
            f"{one['tok_per_s']:,.1f} tok/s",
            "at most: its format was not measured on this processor"
            if one["error"] is None
            else f"+- {100 * one['error']:.0f}%, by {one['models']} other models",
        )
        for kind, one in known.items()
    ]
    return _section("speed to expect now, at short contexts", rows, right=(1,))


def _server_lines(server: dict[str, Any] | None) -> list[str]:
    """The plan of `AsyncLLM`, for people."""
    if server is None:
        return []
    if "rejected" in server:
        message = with_flags(server["rejected"], None, parser_of("inspect").flag_names)
        return textwrap.wrap(f"AsyncLLM would reject it here. {message}", 80)
    blocks = " + ".join(f"{count:,}" for count in server["kv_blocks"])
    kept = f"{blocks} KV blocks of {server['block_size']} tokens" if blocks else "no KV cache"
    line = (
        f"AsyncLLM with {server['sequences']} sequences: {kept}, for {server['of_full_length']} "
        f"of full length."
    )
    return textwrap.wrap(line, 80)


def _verdict(known: dict[str, Any]) -> str:
    if known["fits"] is None and known["mesh"]:
        return "Whether that is free, only these devices could say."
    if known["fits"] is None:
        return "Whether that is free, this device does not say."
    if known["fits"]:
        return "It fits."
    streamed = "a larger --mesh" if known["mesh"] else "--weights-budget"
    return f"It does not fit: try --quantize, {streamed}, --max-model-len or --batch."
