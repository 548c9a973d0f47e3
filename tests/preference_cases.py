"""Losses and rewards that TRL computes on pairs, ten steps of each loss.

`python -m tests.preference_cases` writes tests/data/preferences.json; it needs trl beside the test
environment. TRL's trainers get their pairs as words, each of which is a token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from tests import goldens

FILE = Path(__file__).parent / "data" / "preferences.json"
VARIANT = "llama_gqa"
STEPS, PAIRS, LONGEST = 10, 3, 12
EOS = 1
RATE = 1e-3
CASES = {
    "sigmoid": {"beta": 0.3},
    "hinge": {"loss_type": "hinge", "beta": 0.3},
    "ipo": {"loss_type": "ipo", "beta": 0.5},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2, "beta": 0.3},
    "orpo": {"beta": 0.4},
}
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def pairs() -> list[dict[str, list[int]]]:
    """Ids of the prompt and both answers, which end with EOS, of every step's pairs."""
    random = np.random.RandomState(11)

    def some(least: int) -> list[int]:
        return random.randint(2, goldens.VOCAB, random.randint(least, LONGEST)).tolist()

    return [
        {"prompt": some(2), "chosen": [*some(1), EOS], "rejected": [*some(1), EOS]}
        for _ in range(STEPS * PAIRS)
    ]


def committed() -> dict[str, list[dict[str, float]]]:
    """Per case and step the loss and `NAMES`."""
    return json.loads(FILE.read_text())


def trl_steps(case: str) -> list[dict[str, float]]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.utils.data import SequentialSampler
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    words = {f"<{index}>": index for index in range(goldens.VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=f"<{EOS}>", pad_token="<0>", unk_token="<0>"
    )
    is_orpo = case == "orpo"

    def text(ids: list[int]) -> str:
        return " ".join(f"<{index}>" for index in ids)

    rows = [
        {"prompt": text(one["prompt"])}
        | {key: " " + text(one[key]) for key in ("chosen", "rejected")}
        for one in pairs()
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = (ORPOConfig if is_orpo else DPOConfig)(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=PAIRS, logging_steps=1,
            learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
            gradient_checkpointing=False, max_length=64, disable_tqdm=True, **CASES[case],
        )  # fmt: skip
        base = ORPOTrainer if is_orpo else DPOTrainer

        class InOrder(base):
            def _get_train_sampler(self, *_, **__):
                return SequentialSampler(self.train_dataset)

        reference = {} if is_orpo else {"ref_model": goldens.reference_model(VARIANT)}
        trainer = InOrder(
            model=goldens.reference_model(VARIANT).train(), args=config,
            train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **reference,
        )  # fmt: skip
        trainer.train()
        logs = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: line[name] for name in ("loss", *NAMES)} for line in logs]


def main() -> None:
    found = {case: trl_steps(case) for case in CASES}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
