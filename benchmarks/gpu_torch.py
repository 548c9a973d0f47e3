"""A peer on the same card: the LLaMA shape in plain torch, its weights kept in 8 or 4 bits.

As gpt-fast does it (github.com/meta-pytorch/gpt-fast): a static cache, one compiled step with CUDA
graphs; int8 with a scale per output, upcast inside the product that Inductor makes; int4 with a
bfloat16 scale and zero per output and 32 inputs, by torch's own kernel. Weights are drawn. Clock,
counts and shares are those of `rooflax bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP, TILES_OF_K = 32, 8
"""Inputs of a scale of int4, and how torch's kernel packs them."""
Figures = dict[str, Any]
Step = Callable[[Tensor, Tensor], Tensor]


class Int8(nn.Module):
    """y = x w^T s, w in int8."""

    def __init__(self, w: Tensor):
        super().__init__()
        scales = w.abs().amax(dim=1).float() / 127
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", (w.float() / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales.to(w.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype)) * self.scales


class Int4(nn.Module):
    """y = x w^T, w = (q - 8) s + z of each group of inputs."""

    def __init__(self, w: Tensor):
        super().__init__()
        outer, inner = w.shape
        groups = w.float().reshape(outer, inner // GROUP, GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scales = ((high - low) / 15).clamp(min=1e-6)
        codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15)
        codes = codes.to(torch.int32).reshape(outer, inner)
        both = torch.stack([scales, low + 8 * scales], dim=2).transpose(0, 1).contiguous()
        self.packed: Tensor
        self.scales: Tensor
        if w.is_cuda:
            bytes_ = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(bytes_, TILES_OF_K)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", both.to(w.dtype))

    def forward(self, x: Tensor) -> Tensor:
        ops, rows = torch.ops.aten, x.reshape(-1, x.shape[-1])
        multiply = ops._weight_int4pack_mm if x.is_cuda else ops._weight_int4pack_mm_for_cpu
        return multiply(rows, self.packed, GROUP, self.scales).reshape(*x.shape[:-1], -1)


LINEAR = {8: Int8, 4: Int4}


class Cache(nn.Module):
    """Keys and values of a layer; memory of their own, so that a step writes them in place."""

    def __init__(self, shape: tuple[int, ...], device: str, dtype: torch.dtype):
        super().__init__()
        self.k: Tensor
        self.v: Tensor
        for name in "kv":
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))


class Llama(nn.Module):
    """Of a preset's sizes.

    Args:
        linear: makes a module of a weight [out, in].
        context: tokens that the cache holds.
    """

    def __init__(self, raw: Figures, linear: Any, context: int, device: str, dtype: torch.dtype):
        super().__init__()
        hidden, mlp, count = (
            raw[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        self.heads, self.kv_heads = count, raw["num_key_value_heads"]
        self.head_dim = raw.get("head_dim") or hidden // count
        self.eps = raw["rms_norm_eps"]

        def drawn(outer: int, inner: int) -> Tensor:
            return torch.randn(outer, inner, device=device, dtype=dtype) * 0.02

        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        sizes = {"qkv": (width, hidden), "o": (hidden, self.heads * self.head_dim)}
        sizes |= {"gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}
        layers = raw["num_hidden_layers"]
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: linear(drawn(*size)) for name, size in sizes.items()})
            for _ in range(layers)
        )
        self.embedding = nn.Embedding.from_pretrained(drawn(raw["vocab_size"], hidden))
        self.head = linear(drawn(raw["vocab_size"], hidden))
        ones = torch.ones(2 * layers + 1, hidden, device=device, dtype=dtype)
        size = (1, self.kv_heads, context, self.head_dim)
        self.cache = nn.ModuleList(Cache(size, device, dtype) for _ in range(layers))
        half = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        angles = torch.arange(context, device=device)[:, None] / raw["rope_theta"] ** half
        for name, value in {
            "norms": ones,
            "turns": torch.stack([angles.cos(), angles.sin()], dim=-1),
            "keys": torch.arange(context, device=device),
        }.items():
            self.register_buffer(name, value)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits of the last token.

        Args:
            at: positions.
        """
        x = self.embedding(tokens)
        seen = (self.keys[None] <= at[:, None])[None, None]
        turns = self.turns[at]
        for number, layer in enumerate(self.layers):
            h = layer["qkv"](self.normed(x, 2 * number))
            x = x + layer["o"](self.attend(h, self.cache[number], at, seen, turns))
            gate, up = layer["gate_up"](self.normed(x, 2 * number + 1)).chunk(2, dim=-1)
            x = x + layer["down"](F.silu(gate) * up)
        return self.head(self.normed(x[:, -1:], len(self.norms) - 1))

    def weight_bytes(self) -> int:
        """That a token reads, without its row of the embedding."""
        return sum(
            buffer.nbytes
            for name, buffer in self.named_buffers()
            if name not in ("turns", "keys") and not name.startswith("cache")
        )

    def normed(self, x: Tensor, number: int) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norms[number], self.eps)

    def attend(self, qkv: Tensor, cache: Any, at: Tensor, seen: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(1, 2)
            for part in qkv.unflatten(-1, (-1, self.head_dim)).split(
                (self.heads, self.kv_heads, self.kv_heads), dim=2
            )
        )
        cache.k[:, :, at] = rotated(k, turns)
        cache.v[:, :, at] = v
        out = F.scaled_dot_product_attention(
            rotated(q, turns), cache.k, cache.v, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """RoPE of neighbouring pairs."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


def shape(tiny: bool) -> Figures:
    """The config.json of what peers compute."""
    from benchmarks.gpu_models import TINY_LLAMA
    from rooflax.models.presets import PRESETS

    return {**PRESETS["llama-3.1-8b"], **(TINY_LLAMA if tiny else {})}


def target() -> tuple[str, torch.dtype]:
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def compiled(step: Step, tunes: bool = True) -> Step:
    """As gpt-fast compiles a step, with CUDA graphs; as it is on a CPU.

    Args:
        tunes: by coordinate descent, without which Inductor has no kernel of its own for one row,
            and with which int4 does not end within 100 s.
    """
    if not torch.cuda.is_available():
        return step
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = tunes
    return torch.compile(step, mode="reduce-overhead", fullgraph=True)


def weight_only(
    bits: int, tiny: bool, work: Figures, tunes: bool, implementation: str | None = None
) -> Figures:
    """Batch 1, greedy: a prompt eager, and decoding compiled."""
    del implementation
    raw = shape(tiny)
    context = work["prompt_tokens"] + work["output_tokens"]
    with torch.inference_mode():
        net = Llama(raw, LINEAR[bits], context, *target())

    def run(tokens: Tensor, at: Tensor) -> Tensor:
        return net(tokens, at)[:, -1:].argmax(-1)

    return rates(run, compiled(run, tunes), lambda: None, raw, net.weight_bytes(), work)


def rates(
    prefill: Step, step: Step, begin: Callable[[], Any], raw: Figures, read: int, work: Figures
) -> Figures:
    """The figures of `rooflax bench`, counted and timed as it does.

    Args:
        prefill, step: of tokens and their positions, the next token.
        begin: empties the cache.
        read: bytes of weights that a token reads, without its row of the embedding.
    """
    from rooflax.bench.counting import decode_cost, prefill_cost
    from rooflax.bench.measure import figures
    from rooflax.bench.timeline import Timeline
    from rooflax.bench.trials import run_trial
    from rooflax.bench.workload import Workload
    from rooflax.models.registry import read_config
    from rooflax.nn.storage import Storage

    (device, dtype), counted = target(), Workload(None, **work)
    prompt_tokens, new = counted.prompt_tokens, counted.output_tokens
    prompt = torch.arange(prompt_tokens, device=device)[None] * 7 % raw["vocab_size"]
    places = torch.arange(prompt_tokens + new, device=device)

    @torch.inference_mode()
    def trial() -> Timeline:
        begin()
        start, tokens = now(), []
        tokens.append(prefill(prompt, places[:prompt_tokens]))
        first = now()
        for at in range(prompt_tokens, prompt_tokens + new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(step(tokens[-1].clone(), places[at : at + 1]).clone())
        end = now()
        return Timeline(start, [[first, end]], [tuple(int(t) for t in tokens)])

    for _ in range(3):
        trial()
    reader = ceiling_reader()
    trials = [run_trial(trial, reader) for _ in range(counted.trials)]
    if any(t.timeline.tokens != trials[0].timeline.tokens for t in trials):
        raise ValueError("two trials of the same work gave different tokens")
    name = str(dtype).removeprefix("torch.")
    _, config = read_config(raw)
    widths = {"batch": 1, "storage": Storage(name, None), "kv_dtype": name}
    middle = prompt_tokens + new // 2
    row = raw["hidden_size"] * dtype.itemsize
    costs = [
        replace(cost, weight_bytes=read + row * tokens)
        for cost, tokens in (
            (decode_cost(config, context=middle, **widths), 1),
            (prefill_cost(config, prompt=prompt_tokens, **widths), prompt_tokens),
        )
    ]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "new_tokens": len(trials[0].timeline.tokens[0]),
        **figures(trials, counted, *costs),
    }


def now() -> float:
    """The time at which all that was begun is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


TURNS = 8


def ceiling_reader() -> Callable[[], Any]:
    """What `rooflax.bench.ceilings` reads on a device, with torch's copies and matmuls."""
    from rooflax.bench.ceilings import DEVICE_BUFFER, DEVICE_MATRIX, Ceiling

    (device, dtype), size, side = target(), 1 << 20, 128
    if device == "cuda":
        size, side = min(DEVICE_BUFFER, torch.cuda.mem_get_info()[0] // 4), DEVICE_MATRIX
    buffer = torch.arange(size // 4, device=device, dtype=torch.int32)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            begun = now()
            for _ in range(TURNS):
                call()
            times.append((now() - begun) / TURNS)
        return min(times)

    def read() -> Ceiling:
        copied = 2 * buffer.nbytes / best(lambda: buffer.bitwise_xor_(1))
        rate = 2 * side**3 / best(lambda: torch.matmul(a, b.T, out=product))
        return Ceiling(copied / 1e9, rate, "device", buffer.nbytes)

    read()
    return read
