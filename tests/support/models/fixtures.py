"""Tiny checkpoints on disk, each with what transformers says of it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from rooflax import LLM, ExecutionOptions, load
from tests import goldens


@dataclass
class Case:
    """One variant: its folder, its reference, and the model once it is asked for."""

    variant: str
    folder: Path
    reference: goldens.Reference

    @cached_property
    def model(self):
        return load(self.folder, max_model_len=goldens.MAX_MODEL_LEN.get(self.variant))

    def llm(self, **options):
        length = goldens.MAX_MODEL_LEN.get(self.variant)
        return LLM(self.folder, max_model_len=length, options=ExecutionOptions(**options))


@pytest.fixture(scope="session")
def references():
    """Reference by variant: from transformers where it is installed, else as committed."""
    found = {}

    def get(variant):
        if variant not in found:
            make = goldens.live if goldens.HAVE_TORCH else goldens.committed
            found[variant] = make(variant)
        return found[variant]

    return get


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """Case by variant, written once; its reference is the committed one."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}

    def get(variant):
        if variant not in made:
            reference = goldens.committed(variant)
            folder = goldens.write_checkpoint(root / variant, variant, reference)
            made[variant] = Case(variant, folder, reference)
        return made[variant]

    return get
