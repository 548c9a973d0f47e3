"""Tiny checkpoints of every encoder and what transformers computes from them.

Tensors are a function of their names and shapes, as in `tests.goldens`, and have the names of
published files. `python -m tests.encoder_cases` writes tests/data/goldens/encoders.npz (needs torch
and transformers); the tests ask transformers itself where it is installed.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests import goldens

FILE = goldens.FOLDER / "encoders.npz"
SPECIAL = ("<s>", "<pad>", "</s>")
"""Behind the tokens of `goldens.write_tokenizer`."""
VOCAB = goldens.VOCAB + len(SPECIAL)
TEXTS = ["x", "def f(x): return x + 1", "while True: go on with some more words of text" * 2]
PAIRS = [("what is x", text) for text in TEXTS] + [(TEXTS[2], "x")]

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": 104, "num_hidden_layers": 3,
    "num_attention_heads": 6, "max_position_embeddings": 131, "layer_norm_eps": 1e-5,
}  # fmt: skip
_BERT = _SIZES | {"model_type": "bert", "architectures": ["BertModel"], "type_vocab_size": 2}
_ROBERTA = _SIZES | {
    "model_type": "roberta", "architectures": ["RobertaModel"], "type_vocab_size": 1,
    "pad_token_id": 4, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_MODERNBERT = {k: v for k, v in _SIZES.items() if k != "layer_norm_eps"} | {
    "model_type": "modernbert", "architectures": ["ModernBertModel"], "num_hidden_layers": 5,
    "local_attention": 14, "global_rope_theta": 500.0, "local_rope_theta": 50.0,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "bert_relu": _BERT | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-12},
    "roberta": _ROBERTA,
    "xlm_roberta": _ROBERTA
    | {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "pad_token_id": 1},
    "distilbert": {
        "model_type": "distilbert", "architectures": ["DistilBertModel"], "vocab_size": VOCAB,
        "dim": 60, "hidden_dim": 104, "n_layers": 3, "n_heads": 6, "pad_token_id": 0,
        "max_position_embeddings": 131,
    },
    "mpnet": _SIZES | {"model_type": "mpnet", "architectures": ["MPNetModel"]},
    "nomic_bert": _SIZES
    | {
        "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "type_vocab_size": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "modernbert": _MODERNBERT,
    "modernbert_bias": _MODERNBERT
    | {
        "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
        "classifier_pooling": "mean", "global_attn_every_n_layers": 2,
    },
}  # fmt: skip
FAMILIES = {raw["model_type"] for raw in VARIANTS.values()}
"""Of which tests/engine/test_encoders.py has parity, meshes and formats."""
SCORING = [name for name in VARIANTS if name != "nomic_bert"]
"""Those with a score head here."""


def write(folder: Path, variant: str, *, scores: bool = False, **changes: Any) -> Path:
    """A checkpoint folder with a tokenizer.

    Args:
        scores: with a head of one label.
        changes: of config.json.
    """
    from safetensors.numpy import save_file

    from rooflax.models.registry import family

    raw = VARIANTS[variant] | changes
    shapes = goldens.tensors_of(raw).shapes
    if scores:
        base = raw["architectures"][0].removesuffix("Model")
        raw |= {"architectures": [f"{base}ForSequenceClassification"]}
        raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        head: Any = getattr(family(raw["model_type"]), "SCORE_HEAD", None)
        size = raw["dim" if "dim" in raw else "hidden_size"]
        for index, (name, _) in enumerate(head.layers):
            rows = size if index == 0 else 1
            shapes |= {f"{name}.weight": (rows, size), f"{name}.bias": (rows,)}
        if head.norm:
            shapes[f"{head.norm}.weight"] = (size,)
            if raw.get("norm_bias"):
                shapes[f"{head.norm}.bias"] = (size,)
            if not raw.get("classifier_bias"):
                del shapes[f"{head.layers[0][0]}.bias"]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: goldens.values(variant, name.lower(), shape) for name, shape in shapes.items()}
    if raw["model_type"] == "modernbert":  # whose layers end with no norm: rounding would grow
        tensors |= {n: t / 2 for n, t in tensors.items() if t.ndim == 2 and "embed" not in n}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    _write_tokenizer(folder, types=raw.get("type_vocab_size", 1) > 1)
    return folder


def _write_tokenizer(folder: Path, *, types: bool) -> None:
    """`goldens.write_tokenizer` with `<s> text </s>` and `<s> text </s> text </s>`."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    goldens.write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(SPECIAL))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    second = 1 if types else 0
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A </s> $B:{second} </s>:{second}", special_tokens=ids
    )
    tokenizer.save(str(path))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<s>",
        "sep_token": "</s>", "model_max_length": 120,
        "model_input_names": ["input_ids", "attention_mask"] + ["token_type_ids"] * types,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def live(variant: str, folder: Path) -> dict[str, np.ndarray]:
    """What transformers says now: per text the mean and the first hidden state, and scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        how = {"attn_implementation": "eager", "dtype": torch.float32}
        is_scoring = variant in SCORING
        kind = transformers.AutoModelForSequenceClassification
        kind = kind if is_scoring else transformers.AutoModel
        model, loaded = kind.from_pretrained(folder, output_loading_info=True, **how)
        missing = [name for name in loaded["missing_keys"] if "pooler" not in name]
        assert not missing and not loaded["unexpected_keys"], loaded
        base = getattr(model, model.base_model_prefix) if is_scoring else model
        states = [
            base.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].detach()
            for text in TEXTS
        ]
        scores = [
            model.eval()(**tokenizer(*pair, return_tensors="pt")).logits[0, 0].item()
            for pair in PAIRS
            if is_scoring
        ]
    return {
        "mean": np.stack([state.mean(0).numpy() for state in states]),
        "first": np.stack([state[0].numpy() for state in states]),
        "scores": np.array(scores, np.float32),
    }


@cache
def committed(variant: str) -> dict[str, np.ndarray]:
    """What transformers said when the file was written."""
    with np.load(FILE) as file:
        return {name: file[f"{variant}.{name}"] for name in ("mean", "first", "scores")}


def main() -> None:
    import tempfile

    found = {}
    with tempfile.TemporaryDirectory() as root:
        for variant in VARIANTS:
            folder = write(Path(root) / variant, variant, scores=variant in SCORING)
            found |= {f"{variant}.{k}": v for k, v in live(variant, folder).items()}
    np.savez_compressed(FILE, **found)
    print(f"wrote {FILE}, {FILE.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
