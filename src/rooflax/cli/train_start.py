"""Start of a training: an architecture, its tokenizer, and perhaps weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags
from rooflax.errors import CheckpointError, RequestError
from rooflax.files import read_regular

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer
    from rooflax.models.model import Model


class Start:
    """Start of a training: an architecture, its tokenizer's folder, and perhaps weights."""

    def __init__(self, args: argparse.Namespace):
        from rooflax.input_processor import check_generates
        from rooflax.loading.model_info import model_info
        from rooflax.loading.packed import is_packed
        from rooflax.models.registry import read_config

        where = flags.find_arguments(args) if args.config is None else {}
        self.check, self.trains_all = args.check, args.fine_tune_type == "full"
        self.info = None
        self.raw: dict[str, Any] | None = None
        self.tokenizer_folder = Path(args.tokenizer) if args.tokenizer else None
        if args.config is not None:
            self.raw = _read_config_file(Path(args.config))
            self.family, self.config = read_config(self.raw, ignore=args.ignore_config_keys)
            if args.vocab_size is not None and args.vocab_size > self.config.vocab_size:
                raise RequestError(
                    f"--vocab-size is {args.vocab_size}, and the embedding of {args.config} has "
                    f"{self.config.vocab_size} rows; choose at most that."
                )
            return
        self.info = model_info(args.model, **where)
        check_generates(self.info)
        if is_packed(self.info.raw_config) and args.fine_tune_type == "full":
            raise RequestError(
                f"{self.info.name} has quantized weights, which cannot be trained; train the model "
                f"that it was made from, and quantize the result."
            )
        self.family, self.config = self.info.family, self.info.config
        if self.tokenizer_folder is None:
            self.tokenizer_folder = self.info.tokenizer().folder

    def model(self, seed: int) -> Model:
        """The model with float32 weights."""
        from rooflax.loading.load import load
        from rooflax.models.initialize import random_weights
        from rooflax.models.model import build

        if self.info is not None:
            dtype = "float32" if self.trains_all else None
            return load(self.info, dtype=dtype, check=self.check)
        weights = random_weights(self.family, self.config, seed=seed)
        return build(self.family, self.config, weights, None)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, checked to fit the embedding if it is not the model's own."""
        from rooflax.loading.tokenizer import Tokenizer

        tokenizer = Tokenizer(self.tokenizer_folder or "")
        rows = self.config.vocab_size
        is_own = self.info is not None and self.tokenizer_folder == self.info.folder
        if tokenizer.vocab_size > rows and not is_own:
            raise RequestError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding {rows} rows; "
                f"choose a vocab_size of at least {tokenizer.vocab_size}."
            )
        return tokenizer


def _read_config_file(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_regular(path))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}; it must be a JSON object.")
    return raw
