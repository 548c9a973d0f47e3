"""The TPU plan of the founding documents, point by point: what was done, where, what it brings."""

from __future__ import annotations

from benchmarks.founding import text

NO_TPU = "not measured: no TPU"
POINTS = (
    (
        "Pallas flash attention",
        (
            "Own kernel: the library's has no sinks, or another layout of pages. Prefill and "
            "decode over blocks, windows, sinks, grouped heads"
        ),
        "ops/attention/tpu.py",
        NO_TPU,
    ),
    (
        "`lax.scan` over layers",
        (
            "The default where kernels read stacked weights in place, else an option: without jit "
            "theirs ran layer by layer, with it a loop makes the program small, not the step fast"
        ),
        "nn/layers.py, nn/stacking.py",
        (
            "programs of 512 instructions at any depth; steps as fast (the log), compile time "
            "against depth in optimizations.md"
        ),
    ),
    (
        "Fused kernels: RoPE, SwiGLU, RMSNorm",
        (
            "On CPU norm, activation and residual are part of the products' kernels; on TPU "
            "XLA fuses them into what is around, so no kernel of ours"
        ),
        "ops/linear/prologue.py, csrc/",
        f"on CPU: the log; on TPU {NO_TPU}",
    ),
    (
        "KV cache allocated once, updated in place, laid out for the TPU",
        ("Paged, donated, written by scatter; on TPU 128 tokens a block and heads padded to 128"),
        "nn/kv_cache.py, ops/tiles.py",
        "no copy of the cache in a step (tests); int8 pools are copied once by XLA on TPU",
    ),
    (
        "No float64, bfloat16 wherever possible",
        (
            "x64 is never on; bfloat16 weights and activations off CPU, float32 sums, norms, "
            "softmax, RoPE and logits"
        ),
        "nn/execution.py (Precision)",
        NO_TPU,
    ),
    (
        "JIT: donation, remat, matmul precision, explicit placement",
        (
            "All four; precision is said per product instead of globally, where it would "
            "change numbers silently"
        ),
        "engine/steps.py, nn/layers.py, ops/dot.py, nn/placement.py",
        "on CPU: optimizations.md",
    ),
    (
        "Sharding, tiles of 128, sequence parallelism",
        (
            "A mesh of data, tensor, sequence, expert and stage; each device reads its slice "
            "only; weights packed as matrices of whole tiles"
        ),
        "nn/mesh.py, nn/shards.py, nn/placement.py",
        ("1/N of the split weights per device (tests on 8 simulated ones); speed not measured"),
    ),
    (
        "Einsums to `dot_general`, fewer and larger",
        (
            "One `dot_general` per product: q, k, v fused and gate, up fused at load. "
            "Convolutions for attention were left out: they compute masked work"
        ),
        "ops/dot.py, nn/weights.py",
        "fewer products per layer: 4 in place of 7",
    ),
    (
        "Masks",
        (
            "No mask is kept: positions decide inside the kernel. Block patterns (window, "
            "first tokens, strided) skip hidden blocks"
        ),
        "ops/attention/plan.py, pattern.py",
        "blocks visited follow blocks seen (tests)",
    ),
    (
        "Numerical stability",
        (
            "float32 softmax with its maximum taken off, log-softmax in training and scoring,"
            " gradients clipped by their norm"
        ),
        "ops/attention/, train/step.py",
        "logits within 1e-4 of transformers in float32 (tests)",
    ),
    (
        "More fusion: QKV, residual, embedding + position, mask + softmax",
        (
            "One product for q, k and v; the residual is added by the product; mask and "
            "softmax are one kernel; token and position rows are one fusion of XLA's"
        ),
        "nn/weights.py, ops/linear/, ops/attention/, models/gpt2.py",
        "on CPU: the log",
    ),
    (
        "Compile once: cache, no recompilation, compiled at start",
        (
            "Persistent cache, on by default; buckets compiled before serving, with a "
            "manifest; another shape is then an error"
        ),
        "engine/compilation.py, engine/buckets.py",
        "a second start compiles nothing (tests)",
    ),
    (
        "Memory: pools, placement, memory-mapped weights, gradient accumulation",
        (
            "Blocks are the pool; weights are read from the map slice by slice, and those beyond "
            "a budget layer by layer at every step; micro-batches in training"
        ),
        "engine/block_manager.py, loading/weights.py, train/step.py",
        "loading stays under 1.3 of the weights (tests)",
    ),
    (
        "Quantisation",
        (
            "Own formats in place of AQT, which is no longer kept: w8a8, w8a16, w4a8, w4a16, "
            "MXFP4, fp8, int8 cache; TPU kernels read them at their width"
        ),
        "ops/weights/, ops/linear/tpu.py",
        f"perplexity in quantization.md; on TPU {NO_TPU}",
    ),
)


def markdown() -> str:
    rows = [(str(i), *point) for i, point in enumerate(POINTS, 1)]
    return "\n\n".join(
        [
            "## The TPU plan, point by point",
            text.table(("", "theirs", "here", "where", "what it brings"), rows),
            "Where a kernel runs, and how it is checked without a TPU: [tpu.md](tpu.md).",
        ]
    )
