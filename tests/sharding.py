"""A process with eight simulated devices that runs tiny models over meshes: `Worker`.

Asked over stdin, a line of JSON each, it answers on stdout. The tests' own process has two devices.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests import goldens
from tests.processes import devices

VOCAB = 263
_SIZES = {"vocab_size": VOCAB, "tie_word_embeddings": False}
_LLAMA = _SIZES | {
    "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 131, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GEMMA4 = _LLAMA | {
    "model_type": "gemma4_text", "global_head_dim": 24, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_DEEPSEEK = {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {
    "num_key_value_heads": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "n_shared_experts": 2, "first_k_dense_replace": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "full_attention_interval": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _SIZES | {
        "model_type": "gpt2", "n_positions": 131, "n_embd": 48, "n_inner": 104, "n_layer": 4,
        "n_head": 4, "tie_word_embeddings": True,
    },
    "llama": _LLAMA | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": _LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": _LLAMA | {"model_type": "qwen3"},
    "smollm3": _LLAMA | {"model_type": "smollm3", "num_hidden_layers": 8},
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 7},
    "seed_oss": _LLAMA | {"model_type": "seed_oss"},
    "qwen3_moe": _LLAMA | {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "decoder_sparse_step": 2,
    },
    "mixtral": _LLAMA | {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    "gemma3_text": _LLAMA | {
        "model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
    },
    "granite": _LLAMA | {
        "model_type": "granite", "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    },
    "olmo2": _LLAMA | {"model_type": "olmo2"},
    "qwen3_next": _LLAMA | _DELTA | {
        "model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": _LLAMA | _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": _LLAMA | _DELTA | {
        "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
    "lfm2": {k: v for k, v in _LLAMA.items() if k not in ("head_dim", "rms_norm_eps")} | {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False, "num_attention_heads": 8,
    },
    "olmo3": _LLAMA | {"model_type": "olmo3", "sliding_window": 7, "num_hidden_layers": 8},
    "phi3": _LLAMA | {"model_type": "phi3", "hidden_size": 128, "partial_rotary_factor": 0.5},
    "glm4": _LLAMA | {"model_type": "glm4"},
    "ernie4_5": _LLAMA | {"model_type": "ernie4_5", "use_bias": True},
    "exaone4": _LLAMA | {"model_type": "exaone4", "sliding_window": 7, "num_hidden_layers": 8},
    "cohere2": {k: v for k, v in _LLAMA.items() if k != "rms_norm_eps"}
    | {"model_type": "cohere2", "sliding_window": 7, "hidden_size": 128, "num_hidden_layers": 8},
    "ministral3": _LLAMA | {"model_type": "ministral3"},
    "hunyuan_v1_dense": _LLAMA | {"model_type": "hunyuan_v1_dense"},
    "granitemoehybrid": _LLAMA | {
        "model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 128,
        "layer_types": ["attention"] * 4, "attention_multiplier": 0.2,
    },
    "qwen2_moe": _LLAMA | {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
    },
    "glm4_moe": _LLAMA | {
        "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 2,
    },
    "gemma4_text": _GEMMA4 | {
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 64,
    },
    "gemma4_shared": _GEMMA4 | {
        "num_key_value_heads": 1, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    "deepseek_v2": _DEEPSEEK | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "group_limited_greedy",
        "n_group": 4, "topk_group": 3, "n_routed_experts": 8,
    },
    "deepseek_v3": _DEEPSEEK | {
        "model_type": "deepseek_v3", "q_lora_rank": 40, "n_routed_experts": 4,
        "n_group": 1, "topk_group": 1, "attention_bias": True, "first_k_dense_replace": 0,
    },
    "gpt_oss": _LLAMA | {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 3,
        "sliding_window": 7, "intermediate_size": 64, "num_hidden_layers": 4,
        "torch_dtype": "float32",
    },
}  # fmt: skip
CONFIGS |= {
    name: raw | {key: size for key, size in _LLAMA.items() if key in raw}
    for name, raw in goldens.TINY.items() if name not in CONFIGS
}  # fmt: skip
"""One model per family whose sizes divide by two and four; the vocabulary divides by nothing."""

NEW_TOKENS = 10
DEVICES = 8


class Worker:
    """The process; `ask` raises what it printed where it fails."""

    def __init__(self, folder: Path):
        self.folder = folder
        env = devices(DEVICES) | {"PJRT_NPROC": str(2 * DEVICES)}
        self._errors = open(folder / "errors", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sharding", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            cwd=Path(__file__).parents[1], env=env,
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError((self.folder / "errors").read_text()[-3000:])
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._errors.close()


def write_checkpoint(folder: Path, name: str) -> Path:
    """A checkpoint of one of CONFIGS, with a tokenizer."""
    from tests import goldens

    reference = goldens.tensors_of(CONFIGS[name])

    def halve(tensors: dict[str, np.ndarray]) -> None:
        """Matmuls that keep the size of their rows, as a trained model's do, and so do norms of
        queries where scores have no scale."""
        for key, array in tensors.items():
            scales_scores = name.startswith("gemma4") and "q_norm" in key
            if scales_scores or (array.ndim > 1 and "embed" not in key):
                tensors[key] = (array.astype(np.float32) / 2).astype(array.dtype)

    return goldens.write_checkpoint(folder / name, name, reference, change=halve)


def run(
    folder: str, mesh: str | None, options: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """What a model says: greedy tokens, logits, bytes per device, and shapes that are gathered."""
    import jax

    from rooflax import LLM, ExecutionOptions, SamplingParams
    from rooflax.errors import RooflaxError

    lengths = (5, 16, 17, 33, 65)  # 256 when padded, which no size of a weight is
    prompts = [np.random.RandomState(n).randint(0, VOCAB, n).tolist() for n in lengths]
    try:
        llm = LLM(folder, mesh=mesh, options=ExecutionOptions(**options), **settings)
    except RooflaxError as error:
        return {"error": str(error)}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens = [list(c.tokens) for c in llm.generate(prompts, params)]
    found = llm.logits(prompts[2])
    held: dict[str, int] = {}
    for leaf in jax.tree.leaves(llm.model.weights):
        for shard in leaf.addressable_shards:
            held[str(shard.device)] = held.get(str(shard.device), 0) + shard.data.nbytes
    engine = llm._engine
    assert engine is not None
    cache = engine.runner.cache
    pools = jax.tree.leaves((cache.k, cache.v)) if cache else []
    return {
        "tokens": tokens,
        "logits": found[:, ::7].tolist(),
        "bytes": sorted(held.values()),
        "weights": {
            jax.tree_util.keystr(path): [leaf.shape, leaf.addressable_shards[0].data.shape]
            for path, leaf in jax.tree_util.tree_leaves_with_path(llm.model.weights)
        },
        "cache_bytes": sum(pool.addressable_shards[0].data.nbytes for pool in pools),
        "gathered": gathered_shapes(engine) if mesh and llm.options.jit else [],
    }


def gathered_shapes(engine: Any) -> list[list[int]]:
    """Of every all-gather in the programs that ran, but for int32: positions, never weights."""
    found = set()
    for _, lowered in engine.runner.lowered():
        for line in lowered.compile().as_text().splitlines():
            if re.search(r"\ball-gather(-start)?\(", line):
                found |= set(
                    re.findall(r"\b(?!s32)\w+\d+\[([\d,]*)\]", line.split(" all-gather")[0])
                )
    return sorted([int(n) for n in shape.split(",") if n] for shape in found)


def main(folder: Path) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    made: dict[str, Path] = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whoever prints does not answer
    for line in sys.stdin:
        question = json.loads(line)
        name = question["model"]
        if name in CONFIGS and name not in made:
            made[name] = write_checkpoint(folder, name)
        found = run(
            str(made.get(name, name)), question.get("mesh"), question.get("options", {}),
            question.get("settings", {}),
        )  # fmt: skip
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
