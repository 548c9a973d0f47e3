"""A peer on the same card: the LLaMA shape in plain torch, its weights kept in 8 or 4 bits.

As gpt-fast does it (github.com/meta-pytorch/gpt-fast): a static cache, one compiled step with CUDA
graphs; int8 with a scale per output, upcast inside the product that Inductor makes; int4 with a
bfloat16 scale and zero per output and 32 inputs, by torch's own kernel. Weights are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP, TILES_OF_K = 32, 8
"""Inputs of a scale of int4, and how torch's kernel packs them."""
Figures = dict[str, Any]


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
        shape = (layers, 2, 1, self.kv_heads, context, self.head_dim)
        half = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        angles = torch.arange(context, device=device)[:, None] / raw["rope_theta"] ** half
        for name, value in {
            "norms": ones,
            "cache": torch.zeros(shape, device=device, dtype=dtype),
            "turns": torch.polar(torch.ones_like(angles), angles),
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
        turns = torch.view_as_real(self.turns)[at]
        for number, layer in enumerate(self.layers):
            h = layer["qkv"](self.normed(x, 2 * number))
            x = x + layer["o"](self.attend(h, self.cache[number], at, seen, turns))
            gate, up = layer["gate_up"](self.normed(x, 2 * number + 1)).chunk(2, dim=-1)
            x = x + layer["down"](F.silu(gate) * up)
        return self.head(self.normed(x[:, -1:], len(self.norms) - 1))

    def normed(self, x: Tensor, number: int) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norms[number], self.eps)

    def attend(self, qkv: Tensor, cache: Tensor, at: Tensor, seen: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(1, 2)
            for part in qkv.unflatten(-1, (-1, self.head_dim)).split(
                (self.heads, self.kv_heads, self.kv_heads), dim=2
            )
        )
        cache[0, :, :, at] = rotated(k, turns)
        cache[1, :, :, at] = v
        out = F.scaled_dot_product_attention(
            rotated(q, turns), cache[0], cache[1], attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """RoPE of neighbouring pairs."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


def weight_only(bits: int, tiny: bool, work: Figures, implementation: str | None = None) -> Figures:
    """Batch 1, greedy: tokens a second of a prompt, eager, and of decoding, compiled."""
    del implementation
    from benchmarks.gpu_models import TINY_LLAMA
    from rooflax.models.presets import PRESETS

    raw = {**PRESETS["llama-3.1-8b"], **(TINY_LLAMA if tiny else {})}
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    prompt_tokens, new = work["prompt_tokens"], work["output_tokens"]
    with torch.inference_mode():
        net = Llama(raw, LINEAR[bits], prompt_tokens + new, device, dtype)
    prompt = torch.arange(prompt_tokens, device=device)[None] * 7 % raw["vocab_size"]
    step = torch.compile(net, mode="reduce-overhead", fullgraph=True) if on_gpu else net

    wait = clock(on_gpu)

    @torch.inference_mode()
    def trial() -> tuple[float, float]:
        begun = wait()
        logits = net(prompt, torch.arange(prompt_tokens, device=device))
        token, first = logits[:, -1:].argmax(-1), wait()
        for at in range(prompt_tokens, prompt_tokens + new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = step(token.clone(), torch.tensor([at], device=device))[:, -1:].argmax(-1)
        return first - begun, wait() - first

    read = sum(b.nbytes for n, b in net.named_buffers() if n not in ("cache", "turns"))
    return {"bytes": read, **rates(trial, tiny, work)}


def clock(on_gpu: bool) -> Callable[[], float]:
    """Gives the time at which all that was begun is done."""

    def wait() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    return wait


def rates(trial: Callable[[], tuple[float, float]], tiny: bool, work: Figures) -> Figures:
    """Tokens a second of a prompt and of decoding.

    Args:
        trial: gives the seconds of both.
    """
    from rooflax.bench.statistics import Summary

    for _ in range(1 if tiny else 3):
        trial()
    trials = [trial() for _ in range(work["trials"])]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "prefill_tok_per_s": Summary.of([work["prompt_tokens"] / a for a, _ in trials]).as_json(),
        "decode_tok_per_s": Summary.of(
            [(work["output_tokens"] - 1) / b for _, b in trials]
        ).as_json(),
    }
