"""Makes tests/data/gguf: tokenizers, and GGUF files converted and quantised by llama.cpp itself.

Needs a Python with llama-cpp-python, torch, transformers, sentencepiece and gguf, and the llama.cpp
that llama-cpp-python's source distribution has in its vendor folder:

    python -m tests.make_gguf_fixtures --llama-cpp DIR/vendor/llama.cpp --python PEERS/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests import gguf_cases, gguf_encoder_cases
from tests.support.loading.fixtures import TEXT
from tests.tokenizer_cases import GPT4O, LLAMA3, QWEN2, TEMPLATE, TEXTS

ROOT = Path(__file__).parents[1]
# case: (pattern, name that llama.cpp knows it by, special tokens, eos, adds BOS)
BYTE_LEVEL = {
    "gpt2": (None, "gpt-2", ["<|endoftext|>"], "<|endoftext|>", False),
    "llama3": (
        LLAMA3,
        "llama-bpe",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        "<|eot_id|>",
        True,
    ),
    "qwen2": (QWEN2, "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", False),
    "gpt_oss_mxfp4": (
        GPT4O,
        "gpt-4o",
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"],
        "<|return|>",
        False,
    ),
}
BYTE_LEVEL["qwen3"] = BYTE_LEVEL["qwen2"]
BYTE_LEVEL["smollm3"] = (
    LLAMA3,
    "smaug-bpe",
    ["<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>"],
    "<|im_end|>",
    False,
)
BYTE_LEVEL["llama_k"] = BYTE_LEVEL["llama3"]

# A home-made tokenizer is unknown to the converter's table, so it is told the name.
CONVERT = """
import sys
folder, pre, *sys.argv = sys.argv[1:]
sys.path[:0] = [folder, folder + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
QUANTIZE = """
import ctypes, sys
import llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind.upper())
params.allow_requantize = True
if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
    sys.exit("llama.cpp cannot quantise this")
"""
SENTENCEPIECE = """
import json, sys
import sentencepiece
text, folder, size, texts = sys.argv[1:]
sentencepiece.SentencePieceTrainer.train(
    input=text, model_prefix=folder + "/tokenizer", vocab_size=int(size), model_type="bpe",
    byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
    remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(folder + "/tokenizer.model")
json.dump([[t, processor.encode(t)] for t in json.loads(texts)], open(folder + "/ids.json", "w"))
"""
TRAIN = """
import sys, sentencepiece
text, prefix, size = sys.argv[1:]
sentencepiece.SentencePieceTrainer.train(
    input=text, model_prefix=prefix, vocab_size=int(size), model_type="bpe", byte_fallback=True,
    hard_vocab_limit=False, minloglevel=2,
)
"""
UNIGRAM = """
import base64, json, sys, sentencepiece
from sentencepiece import sentencepiece_model_pb2
text, rules, prefix, pieces = sys.argv[1:]
sentencepiece.SentencePieceTrainer.train(
    input=text, model_prefix=prefix, vocab_size=200, model_type="unigram",
    normalization_rule_tsv=rules, hard_vocab_limit=False, minloglevel=2,
)
model = sentencepiece_model_pb2.ModelProto()
model.ParseFromString(open(prefix + ".model", "rb").read())
table = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
json.dump([[[p.piece, p.score] for p in model.pieces], table], open(pieces, "w"))
"""
RULES = "FF21\t41\nFB01\t66 69\n3000\t20\n"
"""Characters that the tokenizer rewrites: a wide A, a ligature, a wide space."""
CLASSES = {"phi3": "GPT2Tokenizer", "phi3_long": "GPT2Tokenizer"}
"""Of tokenizers, by which the converter knows their kind."""
WITH_SENTENCEPIECE = ("ernie4_5",)
"""Families whose converter reads a tokenizer.model alone."""


def byte_level(name: str, folder: Path) -> None:
    """Trains a tokenizer and writes it as the family's checkpoints have it."""
    pattern, _, special, eos, adds_bos = BYTE_LEVEL[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=adds_bos))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, level])
    if name in ("qwen2", "qwen3"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    size = gguf_cases.CONFIGS[name]["vocab_size"] - len(special) - 1
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    bos = special[0]
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sentencepiece(name: str, folder: Path, python: str) -> None:
    """Trains a SentencePiece model; what it makes of some texts is the reference."""
    text = folder / "text.txt"
    text.write_text("\n".join(line for line in TEXT if line.isascii()))
    size = str(gguf_cases.CONFIGS[name]["vocab_size"] - 1)
    texts = json.dumps([line for chunk in TEXT[:3] for line in chunk.split("\n")])
    subprocess.run([python, "-c", SENTENCEPIECE, text, folder, size, texts], check=True)
    text.unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "add_bos_token": True, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make(name: str, llama_cpp: str, python: str, work: Path) -> None:
    kept = gguf_cases.FOLDER / name
    kept.mkdir(parents=True, exist_ok=True)
    if name in BYTE_LEVEL:
        byte_level(name, kept)
        pre = BYTE_LEVEL[name][1]
    else:
        sentencepiece(name, work, python)
        pre = "default"
        for file in ("ids.json", "tokenizer_config.json"):
            (work / file).rename(kept / file)
    gguf_cases.write_original(work, name)
    if name not in BYTE_LEVEL:
        (work / "tokenizer.json").unlink()
    for kind in gguf_cases.FILES[name]:
        target = gguf_cases.gguf(name, kind)
        outtype = kind if kind in ("f32", "f16", "bf16") else "f32"
        plain = target if kind == outtype else work / "plain.gguf"
        command = [llama_cpp, pre, "convert", str(work), "--outfile", str(plain)]
        subprocess.run([python, "-c", CONVERT, *command, "--outtype", outtype], check=True)
        if plain != target:
            subprocess.run([python, "-c", QUANTIZE, plain, target, kind], check=True)
        print(target.name, target.stat().st_size)


def write_for_converter(folder: Path, name: str, python: str) -> None:
    """The tokenizer's files as the converter asks for them."""
    if name in CLASSES:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"tokenizer_class": CLASSES[name]}
        path.write_text(json.dumps(config))
    if name in WITH_SENTENCEPIECE:
        text = folder / "text.txt"
        text.write_text("\n".join(each for each in TEXTS if each.isascii()))
        train = [python, "-c", TRAIN, text, folder / "tokenizer", "340"]
        subprocess.run(train, check=True, capture_output=True)
        text.unlink()
        (folder / "tokenizer.json").unlink()


def make_family(name: str, llama_cpp: str, python: str, work: Path) -> None:
    """The kept file of a family: a small checkpoint, converted."""
    flags = ["--no-mtp"] if name.startswith(("qwen3_next", "qwen3_5")) else []
    flags += ["--sentence-transformers-dense-modules"] if name == gguf_cases.EMBEDS else []
    gguf_cases.write_kept(work, name)
    write_for_converter(work, name, python)
    target = gguf_cases.kept(name)
    command = [llama_cpp, "gpt-2", "convert", str(work), "--outfile", str(target)]
    command += ["--outtype", "bf16", *flags]
    subprocess.run([python, "-c", CONVERT, *command], check=True)
    print(target.name, target.stat().st_size)


def make_encoder(name: str, llama_cpp: str, python: str, work: Path) -> None:
    """The kept file of an encoder."""
    kind = gguf_encoder_cases.CASES[name][0]
    kept = gguf_encoder_cases.tokenizer_file(kind)
    if kind != "unigram" and not kept.exists():
        gguf_encoder_cases.trained(kind).save(str(kept))
    if kind == "unigram":
        lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
        (work / "text").write_text("\n".join([line for line in lines if line][:80]))
        (work / "rules").write_text(RULES)
        train = [python, "-c", UNIGRAM, *(work / part for part in ("text", "rules", "spm", "json"))]
        subprocess.run(train, check=True)
        pieces, table = json.loads((work / "json").read_text())
        made = gguf_encoder_cases.unigram([(piece, score) for piece, score in pieces], table)
        made.save(str(kept))
    folder = gguf_encoder_cases.write(work / "model", name)
    if (work / "spm.model").exists():
        (work / "spm.model").rename(folder / "sentencepiece.bpe.model")
    target = gguf_encoder_cases.kept(name)
    command = [llama_cpp, "gpt-2", "convert", str(folder), "--outfile", str(target)]
    subprocess.run([python, "-c", CONVERT, *command, "--outtype", "f32"], check=True)
    print(target.name, target.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", required=True)
    parser.add_argument("--python", required=True)
    families = (*gguf_cases.KEPT, gguf_cases.EMBEDS)
    encoders = gguf_encoder_cases.CASES
    names = [*gguf_cases.CONFIGS, *families, *encoders]
    parser.add_argument("names", nargs="*", default=names)
    args = parser.parse_args()
    for name in args.names:
        with tempfile.TemporaryDirectory() as work:
            one = make_family if name in families else make_encoder if name in encoders else make
            one(name, args.llama_cpp, args.python, Path(work))


if __name__ == "__main__":
    main()
