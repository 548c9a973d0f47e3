"""Models, settings and texts small enough to train in a test; every size differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from rooflax.models.initialize import random_weights
from rooflax.models.model import Model, build
from rooflax.models.registry import read_config
from rooflax.train.config import TrainConfig
from rooflax.train.data import STARTS, TRAINED, Corpus, CorpusInfo, PackedBatch, pack

TEXT = Path(__file__).parents[2] / "data" / "python_held_out.txt"
VOCAB = 281
SEPARATOR = 0

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 67, "n_embd": 28, "n_inner": 44,
        "n_layer": 2, "n_head": 4,
    },
    "llama": {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 52,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
        "max_position_embeddings": 67, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
        "max_position_embeddings": 67,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 28, "intermediate_size": 20,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7,
        "max_position_embeddings": 67,
    },
}  # fmt: skip
FAMILIES = tuple(HF_CONFIGS)


def make_model(
    family: str = "llama", *, seed: int = 0, noise: float = 0.0, **changes: Any
) -> Model:
    """A tiny model with random weights.

    Args:
        noise: deviation of what is added to every weight, so that zeros and ones are none.
        changes: keys of config.json that replace those above.
    """
    name, config = read_config(HF_CONFIGS[family] | changes)
    weights = random_weights(name, config, seed=seed)
    if noise:
        rng = np.random.default_rng(seed)

        def noisy(w: Any) -> Any:
            added = noise * rng.standard_normal(w.shape, np.float32)
            return jax.device_put((np.asarray(w) + added).astype(np.float32))

        weights = jax.tree.map(noisy, weights)
    return build(name, config, weights, None)


def settings(**changes: Any) -> TrainConfig:
    """Settings of a short run."""
    given = {
        "batch_size": 4, "seq_len": 16, "learning_rate": 3e-3, "warmup_steps": 3, "eval_every": 0,
        "checkpoint_every": 0,
    } | changes  # fmt: skip
    if "tokens" not in given:
        given.setdefault("steps", 8)
    return TrainConfig(**given)


def random_batch(rows: int, seq_len: int, *, seed: int = 0) -> PackedBatch:
    """Rows of random ids in which documents end here and there, in some rows more often."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, (rows, seq_len + 1))
    often = np.linspace(0.0, 0.3, rows)[:, None]
    ids[rng.random(ids.shape) < often] = SEPARATOR
    return pack_separated(ids, SEPARATOR)


def flags_of(rows: np.ndarray, separator: int) -> np.ndarray:
    """Flags of rows in which every token is trained and the separator ends documents."""
    flags = np.full(rows.shape, TRAINED, np.uint8)
    flags[:, :1] |= STARTS
    flags[:, 1:][rows[:, :-1] == separator] |= STARTS
    return flags


def pack_separated(rows: np.ndarray, separator: int) -> PackedBatch:
    """A batch of rows in which the separator ends documents."""
    return pack(rows.astype(np.int32), flags_of(rows, separator))


def corpus_of(ids: Any, dtype: str = "uint16") -> Corpus:
    """A corpus in memory."""
    tokens = np.asarray(ids, dtype)
    documents = int((tokens == SEPARATOR).sum())
    info = CorpusInfo(dtype, tokens.size, tokens.size, documents, 3 * tokens.size)
    return Corpus(tokens, flags_of(tokens[None], SEPARATOR)[0], info)


def comparable(lines):
    """Lines of a log without settings and what depends on the machine's speed."""
    kept = [line for line in lines if "settings" not in line]
    return [{k: v for k, v in line.items() if k != "time"} for line in kept]
