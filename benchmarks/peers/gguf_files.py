"""GGUF files of a checkpoint, converted and quantised by llama.cpp itself.

Runs where torch, transformers, gguf and llama-cpp-python are installed; llama.cpp's converter is in
the vendor folder of llama-cpp-python's source distribution. Needs nothing of rooflax:

    python gguf_files.py DIR/vendor/llama.cpp CHECKPOINT OUT_PREFIX f32 q8_0 q4_0 q4_k_m

writes OUT_PREFIX.f32.gguf and so on. A home-made tokenizer is unknown to the converter's table of
pre-tokenizers: --pre says what to call it. --pure gives every matrix the type that was asked for;
otherwise llama.cpp keeps some of them wider.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

CONVERTED = ("f32", "f16", "bf16")


def convert(
    llama_cpp: str, checkpoint: str, target: Path, kind: str, pre: str | None, flags: list[str]
) -> None:
    """Runs the converter in this process."""
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    import conversion.base
    import convert_hf_to_gguf

    if pre is not None:
        conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    sys.argv = ["convert", checkpoint, "--outfile", str(target), "--outtype", kind, *flags]
    convert_hf_to_gguf.main()


def quantize(source: Path, target: Path, kind: str, *, pure: bool = False) -> None:
    """Runs llama.cpp's quantiser; unless `pure`, with its own choice of a type per tensor."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.pure = pure
    names = (str(source).encode(), str(target).encode())
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
        sys.exit(f"llama.cpp cannot quantise {source} to {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp")
    parser.add_argument("checkpoint")
    parser.add_argument("prefix")
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--pre", help="name of the pre-tokenizer")
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--no-mtp", action="store_true", help="as the converter's")
    args = parser.parse_args()
    flags = ["--no-mtp"] if args.no_mtp else []
    plain = Path(f"{args.prefix}.f32.gguf")
    plain.parent.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        target = Path(f"{args.prefix}.{kind}.gguf")
        if kind in CONVERTED:
            convert(args.llama_cpp, args.checkpoint, target, kind, args.pre, flags)
            continue
        if not plain.exists():
            convert(args.llama_cpp, args.checkpoint, plain, "f32", args.pre, flags)
        quantize(plain, target, kind, pure=args.pure)
    if "f32" not in args.kinds:
        plain.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
