"""Tiny checkpoints on disk, each with what transformers says of it."""

from dataclasses import dataclass
from functools import cache, cached_property
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
def live_references():
    """Reference by variant: what transformers says now."""
    return cache(goldens.live)


@pytest.fixture(scope="session")
def references(request, live_references):
    """Reference by variant: as committed, or with --every-case from transformers if it is here."""
    every = goldens.HAVE_TORCH and request.config.getoption("every_case")
    return live_references if every else cache(goldens.committed)


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
