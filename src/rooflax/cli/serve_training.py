"""`rooflax serve --train`: the server of training runs, in place of the one that answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags
from rooflax.cli.session import open_llm
from rooflax.errors import RequestError
from rooflax.server.settings import Settings

if TYPE_CHECKING:
    from rooflax.server.run import ServerRunner

OF_ANSWERS = (
    "chat_template", "unknown_fields", "reasoning_field", "tells_tokenizer", "lora_root",
    "max_waiting", "max_per_key", "request_s", "stall_s", "stays", "loras",
    "max_loras", "max_lora_rank", "enable_lora", "max_tokens_per_step", "generation_config",
    "speculate", "num_draft_tokens", "mesh", "weights_budget", "coordinator", "num_processes",
    "process_id",
)  # fmt: skip
"""Flags that mean nothing here."""


def check_flags(args: argparse.Namespace) -> None:
    """
    Raises:
        RequestError: a flag is of the server that answers, or of several devices.
    """
    for name in args.stated:
        if name in OF_ANSWERS:
            from rooflax.cli.main import parser_of

            flag = parser_of("serve").flag_of(name)
            raise RequestError(f"{flag} has no meaning with --train; drop one of them.")


def runner(
    args: argparse.Namespace, settings: Settings, says: Callable[[str], None]
) -> ServerRunner:
    """The server of the model that the flags name."""
    from rooflax.server.run import ServerRunner
    from rooflax.server.training.routes import make_training_app
    from rooflax.server.training.service import TrainingService

    folder = Path(settings.training_folder or "")
    options = replace(flags.execution_options(args), layers="unrolled")

    def load(progress: Callable[[str], None]) -> Any:
        from rooflax.input_processor import check_generates
        from rooflax.rl.trainer import Trainer
        from rooflax.server.training.service import TrainingEngine

        progress("loading the weights")
        slots = {} if args.max_num_seqs is None else {"max_num_seqs": args.max_num_seqs}
        llm = open_llm(
            args, generation_config="none", prefix_caching=False, options=options, **slots
        )
        check_generates(llm.info)
        return TrainingEngine(Trainer(llm, folder), args.model)

    return ServerRunner(settings, load, says, TrainingService(settings), make_training_app)
